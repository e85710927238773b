//! What the host hands to a new program: the initial stack (System V ABI, 3.4.1).
#![allow(unsafe_code)]

use core::ffi::CStr;

/// `AT_PHDR` (getauxval(3)).
const AT_PHDR: u64 = 3;
/// `AT_PHNUM`.
const AT_PHNUM: u64 = 5;
/// `AT_SYSINFO_EHDR`.
const AT_SYSINFO_EHDR: u64 = 33;

/// The initial stack of a program: arguments, environment, auxiliary vector.
pub struct InitialStack {
    words: *const u64,
}

impl InitialStack {
    /// The stack as the program found it.
    ///
    /// # Safety
    /// `words` is what the stack pointer was at the program's entry, and nothing of the
    /// stack, of the strings that it leads to and of the program's headers changes or goes
    /// as long as this is used.
    pub unsafe fn new(words: *const u64) -> Self {
        Self { words }
    }

    /// The first argument: the program's name.
    pub fn name(&self) -> &CStr {
        // SAFETY: the number of arguments, which is not 0 for what the zygote parent starts,
        // and their addresses begin the stack; they are C strings.
        unsafe {
            if self.words.read() == 0 {
                return c"";
            }
            CStr::from_ptr(self.words.add(1).read() as *const _)
        }
    }

    /// The value of a variable of the environment.
    pub fn variable(&self, name: &str) -> Option<&CStr> {
        // SAFETY: a null ends the environment, which lies behind the arguments and the null that
        // ends them; each word before it is the address of a C string.
        let strings = (0..).map_while(|number| unsafe {
            let address = self.words.add(1 + self.words.read() as usize + 1 + number).read();
            (address != 0).then(|| CStr::from_ptr(address as *const _))
        });
        strings.into_iter().find_map(|string| value_of(string, name))
    }

    /// Address of the vdso; 0 if there is none.
    pub fn vdso(&self) -> u64 {
        self.auxiliary(AT_SYSINFO_EHDR)
    }

    /// The segments of the program itself.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + use<> {
        let (headers, count) = (self.auxiliary(AT_PHDR), self.auxiliary(AT_PHNUM));
        (0..count as usize).map(move |index| {
            // SAFETY: the host has mapped the program headers with the program.
            unsafe { (headers as *const Segment).add(index).read() }
        })
    }

    /// A value of the auxiliary vector, which lies behind arguments and environment; 0 if
    /// it is not there.
    fn auxiliary(&self, kind: u64) -> u64 {
        // SAFETY: a null ends each of the three lists, which lie one behind the other.
        unsafe {
            let mut at = self.words.add(1 + self.words.read() as usize + 1);
            while at.read() != 0 {
                at = at.add(1);
            }
            at = at.add(1);
            while at.read() != 0 {
                if at.read() == kind {
                    return at.add(1).read();
                }
                at = at.add(2);
            }
        }
        0
    }
}

/// The value in a string `NAME=value` with that name.
fn value_of<'a>(string: &'a CStr, name: &str) -> Option<&'a CStr> {
    let rest = string.to_bytes_with_nul().strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
    CStr::from_bytes_with_nul(rest).ok()
}

/// A program header (`Elf64_Phdr`, elf(5)).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    /// `PT_*`.
    pub kind: u32,
    /// `PF_*`.
    pub flags: u32,
    offset: u64,
    /// Address of the first byte.
    pub address: u64,
    physical: u64,
    file_size: u64,
    /// Bytes in memory.
    pub memory_size: u64,
    align: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_initial_stack_is_read() {
        let name = c"thaw-zygote";
        let variables = [c"SIZES=1", c"SIZE=23"];
        let header = |kind, flags, address, memory_size| Segment {
            kind,
            flags,
            offset: 0,
            address,
            physical: 0,
            file_size: 0,
            memory_size,
            align: 0,
        };
        let headers = [header(1, 5, 0x1000, 10), header(1, 6, 0x2000, 20)];
        let words = [
            2,
            name.as_ptr().expose_provenance() as u64,
            name.as_ptr().expose_provenance() as u64,
            0,
            variables[0].as_ptr().expose_provenance() as u64,
            variables[1].as_ptr().expose_provenance() as u64,
            0,
            AT_PHNUM,
            2,
            AT_SYSINFO_EHDR,
            0x7000,
            AT_PHDR,
            headers.as_ptr().expose_provenance() as u64,
            0,
            0,
        ];
        // SAFETY: two arguments, an environment of two, and a vector of three values.
        let stack = unsafe { InitialStack::new(words.as_ptr()) };
        assert_eq!(stack.name(), name);
        assert_eq!(stack.variable("SIZE"), Some(c"23"));
        assert_eq!(stack.variable("SIZ"), None);
        assert_eq!(stack.vdso(), 0x7000);
        assert_eq!(stack.auxiliary(6), 0);
        let found: Vec<_> = stack.segments().map(|s| (s.flags, s.address, s.memory_size)).collect();
        assert_eq!(found, [(5, 0x1000, 10), (6, 0x2000, 20)]);
        assert_eq!(size_of::<Segment>(), 56);
    }
}
