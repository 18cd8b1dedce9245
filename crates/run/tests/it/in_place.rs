//! Plans for a machine in place. Invariant: what `plan` says is what the arena takes, to the byte.

use crate::cards::{Card, Memory};
use crate::rig::fixture;
use graph::Bytes;
use plan::Reserved;
use plimsoll_run::price::{Request, program};
use plimsoll_run::{Device, Settings, Stream};
use std::sync::Arc;

#[test]
fn planned_bytes_are_the_arena() {
    for tokens in [512, 1024] {
        let memory = Arc::new(Memory::of(4 << 30));
        let card = Arc::new(Card::new(0).with(Arc::clone(&memory)));
        let device = Device::machines(vec![card]).expect("one kind");
        let settings = Settings { device, ..Settings::default() };
        let mut target = settings.target().expect("a target");
        target.reserved.push(Reserved { label: "context".to_owned(), bytes: Bytes(12_345) });
        let model = fixture("goldens/esm2/config.json").display().to_string();
        let (precision, stream) = (None, Stream::Never);
        let request = Request { tokens: Some(tokens), budget: None, stream, precision, target };
        let program = program(&model, &request).expect("planned");
        let (peak, executors) = (program.peak(), settings.start(program).expect("started"));
        assert_eq!(peak, memory.mapped() + Bytes(12_345));
        assert_eq!(executors[0].program().arena_bytes(), memory.mapped());
    }
}
