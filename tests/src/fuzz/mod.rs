//! What guests, toolstacks and clients may send, as functions of arbitrary bytes: a panic or an assertion
//! that fails is a bug. libFuzzer makes up bytes for them (`tests/fuzz/run`), `cargo test` replays the
//! committed ones. A function may keep what it starts, such as a worker, from one call to the next, but
//! the outcome depends on the bytes alone.

mod control;
mod guest;
mod ring;
mod store;

/// One thing to be fuzzed.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its corpus' folder.
    pub name: &'static str,
    /// Runs it on one input.
    pub run: fn(&[u8]),
    /// More bytes than this say nothing new.
    pub longest: usize,
}

/// Every target.
pub const TARGETS: [Target; 8] = [
    Target {
        name: "slot",
        run: ring::slot,
        longest: 128,
    },
    Target {
        name: "ring",
        run: ring::indices,
        longest: 1024,
    },
    Target {
        name: "indirect",
        run: ring::indirect_page,
        longest: 4100,
    },
    Target {
        name: "journal",
        run: ring::journal,
        longest: 2048,
    },
    Target {
        name: "wire",
        run: store::wire,
        longest: 4096,
    },
    Target {
        name: "keys",
        run: store::keys,
        longest: 1024,
    },
    Target {
        name: "control",
        run: control::requests,
        longest: 4096,
    },
    Target {
        name: "guest",
        run: guest::actions,
        longest: 1024,
    },
];

/// The input, taken from the front; zeroes where it has ended.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.bytes(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.u8()) % from.len()]
    }
}
