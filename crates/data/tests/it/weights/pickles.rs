//! Tests of hostile and unsupported pickles. Invariant: the error names the requested function or class, and nothing is
//! executed.

use std::fs;

use plimsoll_data::weights::Weights;

use super::build::{Pickler, STORED, View, ZipFile, counting, one_tensor, torch_file};
use super::{all, file, folder, refusal};

fn refused(path: &str, global: &str) -> String {
    format!(
        "refused: the pickle in `{path}` asks for `{global}`, which weights do not need; it was not run. \
         Do not load this file elsewhere unless you trust it; ask its author for safetensors"
    )
}

#[test]
fn payloads_are_named_and_not_run() {
    let marker = folder("marker").join("ran");
    let command = format!("touch {}", marker.display());
    let call = |module, name| Pickler::new().global(module, name).raw(b"(").text(&command).raw(b"tR.").stop();
    let check = |bytes: &[u8], global: &str| {
        assert_eq!(refusal(&file("payload", "head.pth", bytes)), refused("payload/head.pth", global));
    };
    for (module, name) in
        [("posix", "system"), ("os", "system"), ("builtins", "eval"), ("nt", "system"), ("torch", "load")]
    {
        check(&torch_file(&call(module, name), &[]), &format!("{module}.{name}"));
        // A bare pickle, without a zip file.
        check(&call(module, name), &format!("{module}.{name}"));
    }
    // STACK_GLOBAL of protocol 4.
    let pickle =
        [&b"\x80\x04\x95\0\0\0\0\0\0\0\0\x8c\x02os\x94\x8c\x06system\x94\x93\x94"[..], b"\x8c\x01x\x85R."]
            .concat();
    check(&torch_file(&pickle, &[]), "os.system");
    // INST and GLOBAL with text arguments, of protocol 0.
    check(b"(ios\nsystem\n.", "os.system");
    check(b"cos\nsystem\n(S'x'\ntR.", "os.system");
    // A dotted name that leads from an allowed module to `os`.
    let pickle = Pickler::new().text("torch.nn.modules.module").text("os.system").raw(b"\x93.").stop();
    check(&torch_file(&pickle, &[]), "torch.nn.modules.module.os.system");
    // Classes that may be restored but not called with arguments, and a storage class created by NEWOBJ.
    check(&torch_file(&call("__main__", "Evil"), &[]), "__main__.Evil(...)");
    check(&torch_file(&call("collections", "OrderedDict"), &[]), "collections.OrderedDict(...)");
    let pickle = Pickler::new().global("torch", "FloatStorage").raw(b")\x81.").stop();
    check(&torch_file(&pickle, &[]), "torch.FloatStorage(...)");
    assert!(!marker.exists());
}

#[test]
fn opcodes_outside_the_list_are_named() {
    // EXT1 (0x82) finds a class in a registry; PERSID (P) and INT (I) are text opcodes of protocol 0.
    for (opcode, arguments) in
        [(0x82u8, &b"\x01"[..]), (b'P', b"0\n"), (b'I', b"1\n"), (0x92, b""), (b'o', b"")]
    {
        let pickle = Pickler::new().raw(&[opcode]).raw(arguments).stop();
        let expected = format!(
            "refused: the pickle in `opcode/w.pt` uses opcode 0x{opcode:02x} at byte 2, which torch does not write \
             for weights; nothing was run. Save the state dict with torch.save, or as safetensors"
        );
        assert_eq!(refusal(&file("opcode", "w.pt", &torch_file(&pickle, &[]))), expected);
    }
}

#[test]
fn malformed_pickles_say_where() {
    let check = |body: &[u8], why: &str| {
        let path = file("malformed", "w.pt", &torch_file(&Pickler::new().raw(body).stop(), &[]));
        let expected = format!("`malformed/w.pt` is damaged: its pickle has {why}; copy or download it again");
        assert_eq!(refusal(&path), expected);
    };
    check(b"X\xff\xff\xff\xff", "an end in the middle of an opcode at byte 7");
    check(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "an end in the middle of an opcode at byte 11");
    check(b"t", "a mark that was never set at byte 3");
    check(b"0", "a stack that is empty at byte 3");
    check(b"h\x07", "a memo entry that was never set at byte 4");
    check(b"]]]s", "items for an object that is not a container of their kind at byte 6");
    check(b"}(Nu", "a key without a value at byte 6");
    check(b"NQ", "a persistent id that is not a storage at byte 4");
    check(b"NNb", "state for an object that is not an instance at byte 5");
    check(b"(N0", "a stack that is empty at byte 6");
    check(b"\x80\x09", "a protocol other than 2 to 5 at byte 4");
}

#[test]
fn sharing_and_nesting_do_not_explode() {
    // Each of 25 levels contains the level below twice, so 26 modules have 2^25 names at the lowest level.
    let class = Pickler::new().global("torch.nn.modules.container", "Sequential").raw(b"q\0");
    let level = |pickler: Pickler| {
        pickler
            .raw(b"h\0)\x81}(")
            .text("_parameters")
            .raw(b"}")
            .text("_modules")
            .raw(b"}(")
            .text("a")
            .raw(b"h\x01")
    };
    let leaf = class.raw(b"h\0)\x81}(").text("_parameters").raw(b"}ubq\x01");
    let shared = (0..25).fold(leaf, |pickler, _| level(pickler).text("b").raw(b"h\x01uubq\x01")).stop();
    let path = file("sharing", "w.pt", &torch_file(&shared, &[]));
    assert_eq!(refusal(&path), "`sharing/w.pt` is not a weight file: its modules share each other without end");
    // A module that contains itself.
    let own = Pickler::new().global("__main__", "M").raw(b")\x81q\x01}(").text("_parameters").raw(b"}");
    let own = own.text("_modules").raw(b"}").text("m").raw(b"h\x01sub").stop();
    let path = file("own", "w.pt", &torch_file(&own, &[]));
    assert_eq!(refusal(&path), "`own/w.pt` is not a weight file: its modules are nested deeper than 32");
    // A million nested lists.
    let path = file("nested", "w.pt", &torch_file(&Pickler::new().raw(&vec![b']'; 1 << 20]).stop(), &[]));
    assert!(refusal(&path).contains("contains neither a state dict nor a module"));
}

#[test]
fn shared_modules_keep_both_names() {
    let stride = [1, 1];
    let view = View::rows("0", &[1, 1], &stride);
    let leaf = Pickler::new().global("__main__", "M").raw(b"q\0)\x81}(").text("_parameters").raw(b"}");
    let leaf = leaf.text("weight").global("torch._utils", "_rebuild_parameter").raw(b"(").tensor(&view);
    let leaf = leaf.raw(b"\x88NtRs").text("_buffers").raw(b"}ubq\x01");
    let root = leaf.raw(b"h\0)\x81}(").text("_parameters").raw(b"}").text("_modules").raw(b"}(");
    let root = root.text("a").raw(b"h\x01").text("b").raw(b"h\x01").text("c").raw(b"Nuub").stop();
    let weights = Weights::open(&file("both", "w.pt", &torch_file(&root, &[&counting(1)]))).expect("it opens");
    let names: Vec<&str> = weights.tensors().map(|tensor| tensor.name()).collect();
    assert_eq!(names, ["a.weight", "b.weight"]);
}

#[test]
fn tensors_must_lie_inside_their_storage() {
    let stride = [2, 1];
    let good = View::rows("0", &[2, 2], &stride);
    let check = |view: &View<'_>, storage: &[u8], expected: &str| {
        assert_eq!(refusal(&file("inside", "w.pt", &one_tensor(view, storage))), expected);
    };
    let past = "tensor `w` in `inside/w.pt`: it reaches past the end of its storage, so the file is damaged";
    check(&View { offset: 1, ..good }, &counting(4), past);
    check(&View { shape: &[1 << 40, 1 << 40], ..good }, &counting(4), past);
    check(&View { stride: &[i64::MAX as u64; 2], ..good }, &counting(4), past);
    let plain = "tensor `w` in `inside/w.pt`: its shape or strides are not plain sizes";
    check(&View { stride: &[1], ..good }, &counting(4), plain);
    check(&View { shape: &[u64::MAX, 2], ..good }, &counting(4), plain);
    // A tensor without elements is valid for any sizes, although their product may overflow.
    let none = View { shape: &[0, 1 << 40, 1 << 40], stride: &[1, 1, 1], ..good };
    let path = file("inside", "w.pt", &one_tensor(&none, &counting(4)));
    assert_eq!(all(&Weights::open(&path).expect("an empty tensor opens"), "w"), [0.0; 0]);
    check(
        &View { shape: &[2, 2, 2], stride: &[1, 2, 4], elements: 8, ..good },
        &counting(8),
        "tensor `w` in `inside/w.pt`: shape [2, 2, 2] with strides [1, 2, 4] is not stored row by row; \
         call .contiguous() on it and save again",
    );
    check(
        &good,
        &counting(3),
        "`inside/w.pt` is damaged: the storage of tensor `w` has 12 bytes where 4 elements of F32 are declared; \
         copy or download it again",
    );
    check(
        &View { key: "9", ..good },
        &counting(4),
        "`inside/w.pt` is damaged: the storage `9` of tensor `w` is missing; copy or download it again",
    );
}

#[test]
fn foreign_files_are_recognised() {
    let check = |bytes: &[u8], expected: &str| {
        let text = refusal(&file("foreign", "w.pt", bytes));
        assert_eq!(text.replace("`foreign/w.pt` is not a weight file: ", ""), expected);
    };
    check(b"", "it is empty; copy or download it again");
    check(b"PK", "expected safetensors, or the zip file that torch.save writes");
    check(
        b"version https://git-lfs.github.com/spec/v1\n",
        "it is a Git LFS pointer, which stands for a file that was not downloaded; fetch the file itself: git lfs pull, or hf \
         download",
    );
    let legacy =
        [&b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."[..], b"\x80\x02M\xe9\x03."].concat();
    let again = refusal(&file("legacy", "w.pt", &legacy));
    assert!(again.starts_with("`legacy/w.pt` is in torch's format of before 1.6; save it again"), "{again}");
    check(
        &STORED.of(&[("readme.txt", b"hello")]),
        "it is a zip file without the one `data.pkl` that torch.save writes",
    );
    let empty = Pickler::new().raw(b"}").stop();
    let script: [(&str, &[u8]); 2] = [("a/data.pkl", &empty), ("a/constants.pkl", b"")];
    check(&STORED.of(&script), "it is TorchScript, a program; save the state dict with torch.save instead");
    let big: [(&str, &[u8]); 2] = [("a/data.pkl", &empty), ("a/byteorder", b"big")];
    check(&STORED.of(&big), "it was saved on a big-endian machine; save it again on a little-endian one");
    let config = Pickler::new().raw(b"}(").text("epoch").int(3).text("lr").raw(b"G\0\0\0\0\0\0\0\0u").stop();
    check(&torch_file(&config, &[]), "it contains a dict without tensors, with the keys `epoch`, `lr`");
    let compressed = ZipFile { method: 8, ..STORED }.of(&[("a/data.pkl", &empty)]);
    assert_eq!(
        refusal(&file("foreign", "w.pt", &compressed)),
        "`foreign/w.pt` holds `a/data.pkl` compressed or encrypted; torch stores entries as they are. \
         Save it again with torch.save, or repack it with `zip -0`"
    );
    let path = file("foreign", "config.json", b"{}");
    assert!(refusal(&path).contains("give the model's folder, or its weight file"));
    fs::create_dir(path.with_file_name("folder.pt")).expect("a folder can be made");
    assert!(refusal(&path.with_file_name("folder.pt")).starts_with("no weights in `foreign/folder.pt`"));
    assert_eq!(
        refusal(&path.with_file_name("nowhere.pt")),
        "cannot read `foreign/nowhere.pt`: No such file or directory (os error 2)"
    );
}

#[test]
fn old_instances_restore_through_the_reconstructor() {
    let stride = [1, 1];
    let view = View::rows("0", &[1, 2], &stride);
    let root = Pickler::new().global("copy_reg", "_reconstructor").raw(b"(").global("__main__", "M");
    let root = root.global("__builtin__", "object").raw(b"NtR}(").text("_parameters").raw(b"}").text("w");
    let root = root.tensor(&view).raw(b"sub").stop();
    let weights = Weights::open(&file("old", "w.pth", &torch_file(&root, &[&counting(2)]))).expect("it opens");
    assert_eq!(all(&weights, "w"), [0.0, 1.0]);
}
