//! Which of the three layouts a frontend uses, and what follows from it. Where a missing `protocol`
//! key leads is the negotiation's business.

use crate::layout::{
    MAX_RING_PAGES, OFFSETS_64, OFFSETS_X86_32, Offsets, PAGE_SIZE, RING_HEADER_BYTES,
    SLOT_BYTES_64, SLOT_BYTES_X86_32,
};

/// A frontend's `protocol`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Abi {
    /// `x86_32-abi`: 64-bit fields aligned to 4 bytes, slots of 108 bytes.
    X86_32,
    /// `x86_64-abi`: slots of 112 bytes.
    X86_64,
    /// `arm-abi`, 32 and 64 bit: laid out as x86_64.
    Arm,
}

impl Abi {
    /// Every layout.
    pub const ALL: [Self; 3] = [Self::X86_32, Self::X86_64, Self::Arm];

    /// What a guest built for this machine uses.
    pub const NATIVE: Self = if cfg!(any(target_arch = "arm", target_arch = "aarch64")) {
        Self::Arm
    } else if cfg!(target_arch = "x86") {
        Self::X86_32
    } else {
        Self::X86_64
    };

    /// The layout named by a `protocol` key (Xen `public/io/protocols.h`).
    #[must_use]
    pub fn from_protocol(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|abi| abi.protocol() == name)
    }

    /// The `protocol` key's value.
    #[must_use]
    pub const fn protocol(self) -> &'static str {
        match self {
            Self::X86_32 => "x86_32-abi",
            Self::X86_64 => "x86_64-abi",
            Self::Arm => "arm-abi",
        }
    }

    /// Bytes of a slot.
    #[must_use]
    pub const fn slot_bytes(self) -> usize {
        match self {
            Self::X86_32 => SLOT_BYTES_X86_32,
            Self::X86_64 | Self::Arm => SLOT_BYTES_64,
        }
    }

    /// Words of a slot.
    pub(crate) const fn slot_words(self) -> usize {
        self.slot_bytes() / 4
    }

    /// Slots of a ring of `pages` pages: the largest power of two that fits behind the header
    /// (ring.h `__RING_SIZE`). 0 unless `pages` is 1 to [`MAX_RING_PAGES`].
    #[must_use]
    pub const fn entries(self, pages: u32) -> u32 {
        if pages == 0 || pages > MAX_RING_PAGES {
            return 0;
        }
        let room = (pages as usize)
            .wrapping_mul(PAGE_SIZE)
            .wrapping_sub(RING_HEADER_BYTES);
        // A page holds at least 36 slots, so the divisor is the smaller and the logarithm defined.
        let fit = match room.checked_div(self.slot_bytes()) {
            Some(fit) => fit,
            None => return 0,
        };
        match fit.checked_ilog2() {
            Some(log) => 1_u32.wrapping_shl(log),
            None => 0,
        }
    }

    /// Where the fields of requests and responses stand.
    #[must_use]
    pub const fn offsets(self) -> Offsets {
        match self {
            Self::X86_32 => OFFSETS_X86_32,
            Self::X86_64 | Self::Arm => OFFSETS_64,
        }
    }
}

const _: () = {
    let mut order = 0;
    while order <= 4 {
        assert!(Abi::X86_32.entries(1 << order) == 32 << order);
        assert!(Abi::X86_64.entries(1 << order) == 32 << order);
        assert!(Abi::Arm.entries(1 << order) == 32 << order);
        order += 1;
    }
};
