//! What the rings of one worker owe each other: none lives at the others' cost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::world::{LIMIT, OKAY, Terms, World, disk};

/// Events in a row that cost nothing, and the longest delay after them; the worker's own numbers.
const FREE_EVENTS: u64 = 8;
const LONGEST_DELAY_MS: u64 = 100;

#[test]
fn a_guest_that_floods_events_is_heard_seldom_and_its_neighbour_as_ever() {
    let world = World::new();
    let target = disk("null:1M");
    let mut flooder = world.attach(&target, &Terms::default());
    let guest = world.neighbour();
    let mut neighbour = world.attach_of(&guest, &target, &Terms::default());
    let began = Instant::now();
    let calm = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !calm.load(Ordering::Relaxed) {
                world.guest.notify(flooder.port);
                std::thread::yield_now();
            }
        });
        let flooded = || flooder.stats().delayed_unmasks > 0;
        let mut rounds = 0;
        while rounds < 500 || !flooded() {
            assert!(began.elapsed() < LIMIT, "{:?}", flooder.stats());
            assert_eq!(neighbour.write(0, 1), OKAY);
            rounds += 1;
        }
        calm.store(true, Ordering::Relaxed);
    });
    // Delays are never shorter than they are meant to be, so this is the most there can have been, however
    // long the test took: those that are free, one for each doubling, and one after each longest delay.
    let longest = began.elapsed().as_millis() as u64 / LONGEST_DELAY_MS;
    let most = FREE_EVENTS + 8 + longest;
    let stats = flooder.stats();
    assert!(stats.events <= most, "{stats:?}, at most {most} events");
    assert!(stats.delayed_unmasks <= stats.empty_events, "{stats:?}");
    let stats = neighbour.stats();
    assert_eq!(stats.delayed_unmasks, 0, "{stats:?}");

    // A request ends it: from then on every event is heard at once.
    assert_eq!(flooder.write(0, 1), OKAY);
    let delayed = flooder.stats().delayed_unmasks;
    for _ in 0..100 {
        assert_eq!(flooder.write(0, 1), OKAY);
    }
    let stats = flooder.stats();
    assert_eq!(stats.delayed_unmasks, delayed, "{stats:?}");
    world.detach(flooder);
    world.detach(neighbour);
}
