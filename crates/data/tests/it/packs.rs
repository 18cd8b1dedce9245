//! Tests of the packer's invariants on random lengths and bounds.

use std::collections::HashMap;

use plimsoll_data::pack::{MAX_PACKS, Order, Packer};
use plimsoll_data::window::record_windows;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn everything_comes_out_once_whole_and_in_time(
        lengths in prop::collection::vec(1_usize..60, 0..400),
        max_tokens in 60_usize..300,
        max_sequences in 1_usize..20,
        order in prop::sample::select(vec![Order::ByLength, Order::Input]),
    ) {
        let mut packer = Packer::new(max_tokens, max_sequences, 60, order);
        let mut pending: HashMap<u64, (usize, usize)> = HashMap::new();
        let mut packs = 0;
        let mut tokens = 0;
        for owner in 0..=lengths.len() {
            let flush = owner == lengths.len();
            if !flush {
                packer.push(owner as u64, &vec![owner as i32; lengths[owner]]).unwrap();
                pending.insert(owner as u64, (lengths[owner], packs));
            }
            while let Some(pack) = packer.next_pack(flush) {
                packs += 1;
                prop_assert!(pack.tokens.len() <= max_tokens);
                prop_assert!(!pack.owners.is_empty() && pack.owners.len() <= max_sequences);
                tokens += pack.tokens.len();
                for (&[start, end], owner) in pack.spans.iter().zip(&pack.owners) {
                    let span = &pack.tokens[start as usize..end as usize];
                    let (length, born) = pending.remove(owner).expect("once");
                    prop_assert_eq!(span, vec![*owner as i32; length]);
                    prop_assert!(packs - born <= MAX_PACKS);
                }
                packer.recycle(pack);
            }
        }
        prop_assert!(pending.is_empty() && packer.pending() == 0);
        prop_assert_eq!(tokens, lengths.iter().sum::<usize>());
        prop_assert_eq!(packer.fill().tokens as usize, tokens);
        prop_assert_eq!(packer.fill().sequences as usize, lengths.len());
    }

    #[test]
    fn windows_cover_any_length_at_any_size(length in 0_usize..5_000_000, size in 1_usize..2_000) {
        let all = record_windows(length, size);
        prop_assert_eq!(all.len(), length.div_ceil(size));
        let mut covered = 0;
        for (i, window) in all.enumerate() {
            prop_assert_eq!(window.index, i);
            prop_assert!(window.start <= covered && window.end() > covered && window.len <= size);
            covered = window.end();
        }
        prop_assert_eq!(covered, length);
    }
}
