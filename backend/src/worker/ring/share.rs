//! How much a ring may take in by one turn, in requests and in bytes, so that a busy or a large-minded guest
//! can't hold up the others' turns: deficit round robin. What a request took beyond its ring's share is missing
//! from the turns that follow.

/// Requests of a turn.
const REQUESTS: u32 = 32;
/// Bytes a ring gains by each turn, and the most it may have.
const BYTES: u64 = 256 << 10;

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Share {
    requests: u32,
    bytes: u64,
    /// Bytes taken beyond the share, to be gained again; less than the largest request.
    debt: u64,
}

impl Share {
    /// A turn begins. What earlier ones left unused is lost.
    pub(super) fn renew(&mut self) {
        self.requests = REQUESTS;
        self.bytes = BYTES.saturating_sub(self.debt);
        self.debt = self.debt.saturating_sub(BYTES);
    }

    /// Another request may be taken in.
    pub(super) fn is_left(&self) -> bool {
        self.requests > 0 && self.bytes > 0
    }

    /// A request of `bytes` was taken in.
    pub(super) fn take(&mut self, bytes: u64) {
        self.requests = self.requests.saturating_sub(1);
        self.debt = self.debt.saturating_add(bytes.saturating_sub(self.bytes));
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of `bytes` taken in by each of the next turns.
    fn turns<const N: usize>(share: &mut Share, bytes: u64) -> [u32; N] {
        std::array::from_fn(|_| {
            share.renew();
            let mut taken = 0;
            while share.is_left() {
                share.take(bytes);
                taken += 1;
            }
            taken
        })
    }

    #[test]
    fn every_turn_is_worth_the_same_in_requests_or_in_bytes() {
        let mut share = Share::default();
        assert_eq!(turns(&mut share, 0), [32, 32, 32]);
        assert_eq!(turns(&mut share, 4096), [32, 32, 32]);
        // 44 KiB: five fit, the sixth is begun; its rest comes off the next turn.
        let direct: [u32; 11] = turns(&mut share, 11 * 4096);
        assert_eq!(direct.iter().sum::<u32>(), 11 * 256 / 44);
        // 1 MiB: one, and then three turns without.
        let mut share = Share::default();
        let largest = [1, 0, 0, 0, 1, 0, 0, 0, 1];
        assert_eq!(turns(&mut share, 1 << 20), largest);
    }

    #[test]
    fn nothing_is_saved_up() {
        let mut share = Share::default();
        for _ in 0..100 {
            share.renew();
        }
        assert_eq!(turns(&mut share, 64 << 10), [4, 4]);
    }
}
