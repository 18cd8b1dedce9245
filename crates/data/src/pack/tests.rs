//! The packer on mixes of lengths: fill, bounds, everything once, nothing starves.

use super::*;

/// A small generator of repeatable numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn uniform(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    fn log_normal(&mut self, median: f64, sigma: f64, low: usize, high: usize) -> usize {
        // The sum of twelve uniform numbers less six is close to normal.
        let normal: f64 = (0..12).map(|_| self.next() as f64 / u64::MAX as f64).sum::<f64>() - 6.0;
        ((median * (sigma * normal).exp()) as usize).clamp(low, high)
    }
}

/// Packs `lengths` in both orders, and checks every invariant on the way; the fill by length.
fn pack(lengths: &[usize], max_tokens: usize, max_sequences: usize) -> Fill {
    pack_in(Order::Input, lengths, max_tokens, max_sequences);
    pack_in(Order::ByLength, lengths, max_tokens, max_sequences)
}

fn pack_in(order: Order, lengths: &[usize], max_tokens: usize, max_sequences: usize) -> Fill {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut packer = Packer::new(max_tokens, max_sequences, longest, order);
    let mut next = 0;
    let mut seen = vec![false; lengths.len()];
    let mut born = vec![0; lengths.len()];
    let mut packs = 0;
    for owner in 0..=lengths.len() {
        let flush = owner == lengths.len();
        if !flush {
            let tokens = vec![owner as i32; lengths[owner]];
            packer.push(owner as u64, &tokens).unwrap();
            born[owner] = packs;
        }
        while let Some(pack) = packer.next_pack(flush) {
            packs += 1;
            assert!(pack.tokens.len() <= max_tokens && pack.owners.len() <= max_sequences);
            assert_eq!(pack.spans.len(), pack.owners.len());
            let mut end = 0;
            for (span, &owner) in pack.spans.iter().zip(&pack.owners) {
                assert_eq!(span[0], end, "no gaps");
                end = span[1];
                let tokens = &pack.tokens[span[0] as usize..span[1] as usize];
                assert_eq!(tokens.len(), lengths[owner as usize]);
                assert!(tokens.iter().all(|&t| t == owner as i32));
                assert!(!std::mem::replace(&mut seen[owner as usize], true), "once");
                assert!(packs - born[owner as usize] <= MAX_PACKS, "starved");
                assert!(order == Order::ByLength || owner == next, "in turn");
                next += 1;
            }
            assert_eq!(end as usize, pack.tokens.len());
            packer.recycle(pack);
        }
        assert!(packer.tokens.len() < POOL * max_tokens);
    }
    assert!(seen.iter().all(|&s| s), "everything");
    assert_eq!(packer.fill().packs as usize, packs);
    packer.fill()
}

fn check(name: &str, lengths: &[usize], max_tokens: usize, least: f64) {
    let fill = pack(lengths, max_tokens, max_tokens);
    eprintln!("{name}, {max_tokens}: {:.4} ({:.4} with the last)", fill.but_last(), fill.all());
    assert!(fill.but_last() >= least, "{name}, {max_tokens}: {fill:?}");
}

#[test]
fn packs_of_realistic_mixes_are_full() {
    let mut r = Random(1);
    let uniform: Vec<usize> = (0..10_000).map(|_| r.uniform(52, 170)).collect();
    let fixed = vec![168; 5_000];
    let frames: Vec<usize> = (0..10_000).map(|_| if r.uniform(0, 2) > 0 { 168 } else { 167 }).collect();
    let proteins: Vec<usize> = (0..5_000).map(|_| r.log_normal(270.0, 0.6, 20, 1024)).collect();
    let short: Vec<usize> = (0..10_000).map(|_| r.log_normal(50.0, 0.5, 12, 170)).collect();
    for max_tokens in [1024, 2048, 4096, 16_384] {
        check("uniform 52..170", &uniform, max_tokens, 0.99);
        check("short log-normal", &short, max_tokens, 0.99);
        check("log-normal", &proteins, max_tokens, if max_tokens > 1024 { 0.99 } else { 0.97 });
        // All of one length: what fits is a matter of division.
        check("168", &fixed, max_tokens, (max_tokens / 168 * 168) as f64 / max_tokens as f64);
        check("167 and 168", &frames, max_tokens, (max_tokens / 168 * 167) as f64 / max_tokens as f64);
    }
}

#[test]
fn bounds_that_hardly_fit() {
    let mut r = Random(2);
    let lengths: Vec<usize> = (0..2_000).map(|_| r.uniform(1, 100)).collect();
    pack(&lengths, 100, 1);
    pack(&lengths, 100, 3);
    pack(&lengths, 101, 1000);
    pack(&vec![1; 5_000], 1_000, 7);
    pack(&vec![100; 50], 100, 10);
    pack(&[], 100, 10);
    pack(&[5], 100, 10);
    let long_and_short: Vec<usize> = (0..5_000).map(|i| if i % 2 == 0 { 1000 } else { 10 }).collect();
    pack(&long_and_short, 1024, 1024);
    let one_medium: Vec<usize> = (0..5_000).map(|i| if i == 7 { 513 } else { 512 }).collect();
    pack(&one_medium, 1024, 1024);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut packer = Packer::new(100, 10, 40, Order::ByLength);
    assert!(packer.push(0, &[0; 40]).is_ok());
    let error = packer.push(1, &[0; 41]).unwrap_err();
    assert!(matches!(error.kind, DataErrorKind::TooLong { tokens: 41, bound: 40 }));
    assert!(packer.push(2, &[]).is_err());
    assert!(Packer::new(100, 10, 1000, Order::Input).push(0, &[0; 101]).is_err());
    assert_eq!(packer.pending(), 1);
}

#[test]
fn nothing_comes_before_the_pool_is_full() {
    let check = |order, first: u64| {
        let mut packer = Packer::new(10, 10, 10, order);
        for owner in 0..first {
            packer.push(owner, &[1; 4]).unwrap();
            assert!(packer.next_pack(false).is_none());
        }
        packer.push(first, &[1; 4]).unwrap();
        assert_eq!(packer.next_pack(false).unwrap().owners, [0, 1]);
        assert!(packer.next_pack(false).is_none());
    };
    check(Order::ByLength, 9);
    check(Order::Input, 2);
}

#[test]
fn by_length_packs_are_fuller() {
    let mut r = Random(4);
    let lengths: Vec<usize> = (0..5_000).map(|_| r.log_normal(270.0, 0.6, 20, 1024)).collect();
    let [by_length, input] =
        [Order::ByLength, Order::Input].map(|order| pack_in(order, &lengths, 2048, 2048).but_last());
    eprintln!("by length {by_length:.3}, in the input's order {input:.3}");
    assert!(by_length > 0.99 && input < 0.95);
}

#[test]
fn the_steady_state_reuses_its_buffers() {
    let mut packer = Packer::new(1000, 100, 100, Order::ByLength);
    let pool = packer.tokens.capacity();
    let mut r = Random(3);
    for owner in 0..5_000 {
        let tokens = vec![1; r.uniform(10, 100)];
        packer.push(owner, &tokens).unwrap();
        while let Some(pack) = packer.next_pack(false) {
            assert_eq!(pack.tokens.capacity(), 1000);
            packer.recycle(pack);
        }
        assert!(packer.free.len() <= 1);
    }
    assert_eq!(packer.tokens.capacity(), pool);
}

#[test]
fn the_fill_of_nothing_is_whole() {
    assert_eq!(Fill::default().all(), 1.0);
    assert_eq!(Fill::default().but_last(), 1.0);
}

/// `cut(parts)` divides the remaining sequences into packs of about equal size, a multiple of `parts` if enough tokens
/// remain, and the fill is measured against the reduced size of these packs.
#[test]
fn what_is_left_is_cut_evenly() {
    let mut r = Random(5);
    for (parts, left) in [(2, 900), (4, 3_500), (16, 3_500), (6, 40), (8, 0)] {
        let mut packer = Packer::new(1000, 1000, 100, Order::ByLength);
        let mut owner = 0;
        let mut sum = 0;
        while sum < left {
            let tokens = vec![1; r.uniform(5, 20)];
            packer.push(owner, &tokens).unwrap();
            (owner, sum) = (owner + 1, sum + tokens.len());
        }
        packer.cut(parts);
        let packs: Vec<TokenPack> = std::iter::from_fn(|| packer.next_pack(true)).collect();
        let sizes: Vec<usize> = packs.iter().map(|pack| pack.tokens.len()).collect();
        assert_eq!(sizes.iter().sum::<usize>(), sum);
        if left >= 20 * parts {
            assert!(packs.len().abs_diff(parts) <= 1, "{parts}: {sizes:?}");
            let but_last = &sizes[..sizes.len() - 1];
            let most = sum.div_ceil(parts) + 20;
            assert!(
                but_last.iter().all(|&size| size <= most && size + 40 >= sum / parts),
                "{parts}: {sizes:?}"
            );
            assert!(packer.fill().but_last() > 0.9, "{:?}", packer.fill());
        }
    }
}

#[test]
fn a_pack_is_divided_in_order() {
    let lengths = [3, 5, 2, 2, 9, 1, 1, 1];
    let mut pack = TokenPack::default();
    for (owner, &length) in (0..).zip(&lengths) {
        let start = pack.tokens.len() as i32;
        pack.tokens.extend((0..length).map(|at| 100 * owner + at));
        pack.spans.push([start, start + length]);
        pack.owners.push(owner as u64);
    }
    assert_eq!(pack.clone().divided(24, 8), [pack.clone()]);
    for (tokens, sequences, wanted) in [
        (8, 8, &[2, 2, 1, 3][..]),
        (8, 2, &[2, 2, 1, 2, 1]),
        (9, 1, &[1; 8]),
        (23, 8, &[7, 1]),
        // A sequence that is too long is alone.
        (4, 8, &[1, 1, 2, 1, 3]),
    ] {
        let packs = pack.clone().divided(tokens, sequences);
        let found: Vec<usize> = packs.iter().map(|pack| pack.owners.len()).collect();
        assert_eq!(found, wanted, "{tokens} tokens, {sequences} sequences");
        let mut owner = 0;
        for pack in &packs {
            assert_eq!(pack.spans[0][0], 0);
            for (&[start, end], &of) in pack.spans.iter().zip(&pack.owners) {
                let wanted: Vec<i32> = (0..lengths[owner]).map(|at| 100 * owner as i32 + at).collect();
                assert_eq!((of, &pack.tokens[start as usize..end as usize]), (owner as u64, &wanted[..]));
                owner += 1;
            }
        }
        assert_eq!(owner, lengths.len());
    }
}
