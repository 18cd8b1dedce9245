//! Integration tests of `plimsoll-report`.

mod browser;
mod page;
mod timeline;
mod training;
