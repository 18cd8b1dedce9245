// unwritten
