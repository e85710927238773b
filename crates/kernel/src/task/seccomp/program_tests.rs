use alloc::vec;

use super::*;

/// An instruction without jumps, and one with.
fn one(code: u16, constant: u32) -> Instruction {
    Instruction { code, constant, ..Default::default() }
}

fn jump(code: u16, constant: u32, if_true: u8, if_false: u8) -> Instruction {
    Instruction { code, if_true, if_false, constant }
}

const STOP: Instruction = Instruction { code: 6, if_true: 0, if_false: 0, constant: 0 };
const STOP_WITH_A: Instruction = Instruction { code: 0x16, ..STOP };

fn is_right(instructions: &[Instruction]) -> bool {
    Program::check(instructions.to_vec()).is_ok()
}

fn run(instructions: &[Instruction]) -> u32 {
    let mut data = Data::default();
    for (at, word) in data.iter_mut().enumerate() {
        *word = 100 + at as u32;
    }
    Program::check(instructions.to_vec()).unwrap().run(&data)
}

/// `seccomp_check_filter` names all codes.
#[test]
fn only_the_codes_of_linux_are_allowed() {
    let mut allowed = vec![0x20, 0x80, 0x81, 0x06, 0x16, 0x84, 0x00, 0x01, 0x07, 0x87];
    allowed.extend([0x60, 0x61, 0x02, 0x03, 0x05]);
    for operation in [0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xa0] {
        allowed.extend([0x04 | operation, 0x0c | operation]);
    }
    for condition in [0x10, 0x20, 0x30, 0x40] {
        allowed.extend([0x05 | condition, 0x0d | condition]);
    }
    for code in 0..=u16::MAX {
        // Memory is stored first, and the constant fits all codes.
        let constant = if code == 0x20 { 4 } else { 1 };
        let program = [one(0x02, 1), one(code, constant), STOP, STOP];
        assert_eq!(is_right(&program), allowed.contains(&code), "{code:#x}");
    }
}

#[test]
fn constants_have_bounds() {
    for (code, right, wrong) in [
        (0x20, 60, 64),
        (0x20, 0, 2),
        (0x20, 8, !3),
        (0x34, 1, 0),
        (0x64, 31, 32),
        (0x74, 31, u32::MAX),
        (0x02, 15, 16),
        (0x03, 15, u32::MAX),
        (0x05, 0, 1),
        (0x05, 0, u32::MAX),
    ] {
        assert!(is_right(&[one(code, right), STOP]), "{code:#x} {right}");
        assert!(!is_right(&[one(code, wrong), STOP]), "{code:#x} {wrong}");
    }
}

#[test]
fn jumps_stay_inside() {
    assert!(is_right(&[jump(0x15, 0, 1, 0), STOP, STOP]));
    assert!(!is_right(&[jump(0x15, 0, 2, 0), STOP, STOP]));
    assert!(!is_right(&[jump(0x15, 0, 0, 255), STOP, STOP]));
    assert!(!is_right(&[STOP, jump(0x15, 0, 0, 0)]));
}

#[test]
fn programs_end_and_have_a_bound() {
    assert!(!is_right(&[]));
    assert!(!is_right(&[one(0, 1)]));
    assert!(!is_right(&[STOP, one(0, 1)]));
    assert!(is_right(&vec![STOP; INSTRUCTIONS_MAX]));
    assert!(!is_right(&vec![STOP; INSTRUCTIONS_MAX + 1]));
}

#[test]
fn memory_is_stored_on_every_way_before_it_is_loaded() {
    let (store, load) = (one(0x02, 3), one(0x60, 3));
    assert!(is_right(&[store, load, STOP]));
    assert!(!is_right(&[load, STOP]));
    assert!(!is_right(&[store, one(0x61, 4), STOP]));
    assert!(!is_right(&[one(0x61, 16), STOP]));
    // One way leaves the store out; on the other program both have it.
    assert!(!is_right(&[jump(0x15, 0, 1, 0), store, load, STOP]));
    assert!(is_right(&[jump(0x15, 0, 2, 0), store, one(0x05, 1), store, load, STOP]));
    assert!(!is_right(&[jump(0x15, 0, 2, 0), store, one(0x05, 1), one(0x02, 4), load, STOP]));
    // Behind a jump everything counts as stored on the way that nobody takes.
    assert!(is_right(&[one(0x05, 1), load, STOP]));
}

#[test]
fn programs_compute_as_linux_does() {
    const A: Instruction = STOP_WITH_A;
    // A = 200, X = 7.
    let numbers = [one(0x00, 200), one(0x01, 7)];
    for (code, constant, result) in [
        (0x04, u32::MAX, 199),
        (0x0c, 0, 207),
        (0x14, 201, u32::MAX),
        (0x1c, 0, 193),
        (0x24, 0x8000_0001, 200),
        (0x2c, 0, 1400),
        (0x34, 3, 66),
        (0x3c, 0, 28),
        (0x44, 0xf, 0xcf),
        (0x4c, 0, 207),
        (0x54, 0xf0, 0xc0),
        (0x5c, 0, 0),
        (0x64, 31, 0),
        (0x6c, 0, 25_600),
        (0x74, 4, 12),
        (0x7c, 0, 1),
        (0x84, 0, 200u32.wrapping_neg()),
        (0xa4, 0xff, 55),
        (0xac, 0, 207),
        (0x87, 0, 7),
        (0x80, 0, 64),
        (0x00, 5, 5),
        (0x20, 0, 100),
        (0x20, 60, 115),
    ] {
        let program = [numbers[0], numbers[1], one(code, constant), A];
        assert_eq!(run(&program), result, "{code:#x} {constant}");
    }
    // A shift uses five bits, and a division by zero ends the program.
    assert_eq!(run(&[numbers[0], one(0x01, 33), one(0x6c, 0), A]), 400);
    assert_eq!(run(&[numbers[0], one(0x01, 0), one(0x3c, 0), A]), 0);
    assert_eq!(run(&[numbers[0], one(0x07, 0), one(0x00, 1), one(0x87, 0), A]), 200);
    assert_eq!(run(&[one(0x81, 0), one(0x03, 15), one(0x60, 15), A]), 64);
    assert_eq!(run(&[numbers[0], one(0x02, 0), one(0x61, 0), one(0x87, 0), A]), 200);
}

#[test]
fn jumps_follow_their_conditions() {
    let [yes, no] = [1, 2].map(|verdict| one(6, verdict));
    for (code, constant, index, holds) in [
        (0x15, 10, 0, true),
        (0x15, 11, 0, false),
        (0x1d, 0, 10, true),
        (0x25, 9, 0, true),
        (0x25, 10, 0, false),
        (0x2d, 0, 9, true),
        (0x35, 10, 0, true),
        (0x35, 11, 0, false),
        (0x3d, 0, 0x8000_0000, false),
        (0x45, 2, 0, true),
        (0x45, 5, 0, false),
        (0x4d, 0, 8, true),
    ] {
        let program = [one(0, 10), one(1, index), jump(code, constant, 1, 0), no, yes];
        assert_eq!(run(&program) == 1, holds, "{code:#x} {constant} {index}");
    }
    assert_eq!(run(&[one(0x05, 1), no, yes]), 1);
}
