//! Modes of a terminal: `struct termios` and its flags (termios(3)), and the
//! numbers of the ioctls (ioctl_tty(2)).
#![allow(missing_docs)]

/// `struct termios` of the kernel ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Termios {
    pub input: u32,
    pub output: u32,
    pub control: u32,
    pub local: u32,
    pub line: u8,
    pub characters: [u8; 19],
}

/// `struct termios2`: as above, with speeds.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Termios2 {
    pub termios: Termios,
    pub input_speed: u32,
    pub output_speed: u32,
}

/// `struct termio`: the modes as System V had them, 16 bits each.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Termio {
    pub modes: [u16; 4],
    pub line: u8,
    pub characters: [u8; 8],
    pub pad: u8,
}

impl Termios {
    /// The part of the modes that `struct termio` has.
    pub fn to_termio(self) -> Termio {
        let modes = [self.input, self.output, self.control, self.local].map(|mode| mode as u16);
        let mut characters = [0; 8];
        characters.copy_from_slice(&self.characters[..8]);
        Termio { modes, line: self.line, characters, pad: 0 }
    }

    /// These modes with that part replaced.
    pub fn with_termio(mut self, termio: &Termio) -> Self {
        let all = [&mut self.input, &mut self.output, &mut self.control, &mut self.local];
        for (mode, low) in all.into_iter().zip(termio.modes) {
            *mode = (*mode & 0xffff_0000) | u32::from(low);
        }
        self.characters[..8].copy_from_slice(&termio.characters);
        self
    }
}

/// `struct winsize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct WinSize {
    pub rows: u16,
    pub columns: u16,
    pub x_pixels: u16,
    pub y_pixels: u16,
}

impl Termios {
    /// What a fresh terminal has (`tty_std_termios`).
    pub const STANDARD: Termios = Termios {
        input: ICRNL | IXON,
        output: OPOST | ONLCR,
        control: 0o277,
        local: ISIG | ICANON | ECHO | ECHOE | ECHOK | ECHOCTL | ECHOKE | IEXTEN,
        line: 0,
        characters: [3, 28, 127, 21, 4, 0, 1, 0, 17, 19, 26, 0, 18, 15, 23, 22, 0, 0, 0],
    };

    pub fn has_input(&self, flag: u32) -> bool {
        self.input & flag != 0
    }

    pub fn has_output(&self, flag: u32) -> bool {
        self.output & flag != 0
    }

    pub fn has_local(&self, flag: u32) -> bool {
        self.local & flag != 0
    }

    /// Whether `byte` is the special character at `index`; 0 disables one.
    pub fn is(&self, index: usize, byte: u8) -> bool {
        byte != 0 && self.characters[index] == byte
    }
}

// Input modes.
pub const ISTRIP: u32 = 0o40;
pub const INLCR: u32 = 0o100;
pub const IGNCR: u32 = 0o200;
pub const ICRNL: u32 = 0o400;
pub const IXON: u32 = 0o2000;
pub const IXANY: u32 = 0o4000;
pub const IMAXBEL: u32 = 0o20000;
pub const IUTF8: u32 = 0o40000;

// Output modes.
pub const OPOST: u32 = 0o1;
pub const ONLCR: u32 = 0o4;
pub const OCRNL: u32 = 0o10;
pub const ONOCR: u32 = 0o20;
pub const ONLRET: u32 = 0o40;
pub const XTABS: u32 = 0o14000;

// Local modes.
pub const ISIG: u32 = 0o1;
pub const ICANON: u32 = 0o2;
pub const ECHO: u32 = 0o10;
pub const ECHOE: u32 = 0o20;
pub const ECHOK: u32 = 0o40;
pub const ECHONL: u32 = 0o100;
pub const NOFLSH: u32 = 0o200;
pub const TOSTOP: u32 = 0o400;
pub const ECHOCTL: u32 = 0o1000;
pub const ECHOKE: u32 = 0o4000;
pub const IEXTEN: u32 = 0o100000;

// Special characters.
pub const VINTR: usize = 0;
pub const VQUIT: usize = 1;
pub const VERASE: usize = 2;
pub const VKILL: usize = 3;
pub const VEOF: usize = 4;
pub const VTIME: usize = 5;
pub const VMIN: usize = 6;
pub const VSTART: usize = 8;
pub const VSTOP: usize = 9;
pub const VSUSP: usize = 10;
pub const VEOL: usize = 11;
pub const VREPRINT: usize = 12;
pub const VWERASE: usize = 14;
pub const VLNEXT: usize = 15;
pub const VEOL2: usize = 16;

// ioctls.
pub const TCGETS: u32 = 0x5401;
pub const TCSETS: u32 = 0x5402;
pub const TCSETSW: u32 = 0x5403;
pub const TCSETSF: u32 = 0x5404;
pub const TCGETA: u32 = 0x5405;
pub const TCSETA: u32 = 0x5406;
pub const TCSETAW: u32 = 0x5407;
pub const TCSETAF: u32 = 0x5408;
pub const TCSBRK: u32 = 0x5409;
pub const TCXONC: u32 = 0x540a;
pub const TCFLSH: u32 = 0x540b;
pub const TIOCEXCL: u32 = 0x540c;
pub const TIOCNXCL: u32 = 0x540d;
pub const TIOCSCTTY: u32 = 0x540e;
pub const TIOCGPGRP: u32 = 0x540f;
pub const TIOCSPGRP: u32 = 0x5410;
pub const TIOCOUTQ: u32 = 0x5411;
pub const TIOCGWINSZ: u32 = 0x5413;
pub const TIOCSWINSZ: u32 = 0x5414;
pub const FIONREAD: u32 = 0x541b;
pub const TIOCPKT: u32 = 0x5420;
pub const TIOCNOTTY: u32 = 0x5422;
pub const TIOCSETD: u32 = 0x5423;
pub const TIOCGETD: u32 = 0x5424;
pub const TCSBRKP: u32 = 0x5425;
pub const TIOCGSID: u32 = 0x5429;
pub const TCGETS2: u32 = 0x802c_542a;
pub const TCSETS2: u32 = 0x402c_542b;
pub const TCSETSW2: u32 = 0x402c_542c;
pub const TCSETSF2: u32 = 0x402c_542d;
pub const TIOCGPTN: u32 = 0x8004_5430;
pub const TIOCSPTLCK: u32 = 0x4004_5431;
pub const TIOCGDEV: u32 = 0x8004_5432;
pub const TIOCSIG: u32 = 0x4004_5436;
pub const TIOCGPKT: u32 = 0x8004_5438;
pub const TIOCGPTLCK: u32 = 0x8004_5439;
pub const TIOCGPTPEER: u32 = 0x5441;
