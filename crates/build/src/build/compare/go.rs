//! Which functions of a program in Go draw from `math/rand`.
//!
//! Go seeds that generator when the program starts, in memory that copies share, and offers no
//! way to seed it anew, so nothing has to be compared. A program has a table of its functions
//! even when it is stripped (`pcHeader`, `functab` and `_func` of `runtime/symtab.go`; Go 1.18
//! and later). Calls are found in the machine code of those that are not Go's own library.

use super::super::findings;
use super::listed;
use object::elf::{FileHeader64, SectionHeader64};
use object::read::elf::{FileHeader, SectionHeader};
use object::{LittleEndian, ReadCache, ReadRef};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use thaw_home::config::RuntimeKind;
use thaw_home::function::Finding;
use thaw_home::function::StoredFunction;
use thaw_home::rootfs::StoredRootfs;
use thaw_store::index::Content;
use thaw_store::{IndexId, Session, Tree};

/// Largest program that is looked at. It is the author's, and may be hostile.
const PROGRAM_MAX: u64 = 512 << 20;
/// Most sections of it.
const SECTIONS_MAX: u16 = 1024;
/// Most bytes of a function's name.
const NAME_MAX: usize = 256;
/// `magic` of Go 1.18 and of 1.20.
const MAGICS: [u32; 2] = [0xffff_fff0, 0xffff_fff1];
/// Most functions that a table may have.
const FUNCTIONS_MAX: usize = 4 << 20;
/// Where the address of the first function is in `moduledata`, of the section `.go.module`.
const TEXT_OF_MODULE: usize = 176;
/// What begins a near call with an operand of 32 bits (Intel SDM, CALL).
const CALL: u8 = 0xe8;
/// Functions that the compiler puts into their callers as a whole, so that no call is left but one
/// through an interface. Go's own library uses `math/rand/v2.Uint64` so, which is left out.
const INLINED: [&str; 11] = [
    "math/rand.Int",
    "math/rand.Int31",
    "math/rand.Int63",
    "math/rand.Uint32",
    "math/rand/v2.Float32",
    "math/rand/v2.Float64",
    "math/rand/v2.Int",
    "math/rand/v2.Int32",
    "math/rand/v2.Int64",
    "math/rand/v2.Uint",
    "math/rand/v2.Uint32",
];
/// What names of the packages' functions begin with.
const PACKAGES: [&str; 2] = ["math/rand.", "math/rand/v2."];
/// First elements of the import paths of Go's own library.
const LIBRARY: &str = " archive bufio bytes cmp compress container context crypto database debug embed encoding \
    errors expvar flag fmt go hash html image index internal io iter log maps math mime net os path plugin \
    reflect regexp runtime slices sort strconv strings structs sync syscall testing text time type unicode \
    unique unsafe vendor weak ";

/// What there is to say of a function's program, if that is in Go.
pub(in super::super) fn generators(
    session: &Session,
    function: &StoredFunction,
    index: IndexId,
) -> Option<Finding> {
    let kind = function.runtime().map_or(RuntimeKind::Image, |runtime| runtime.kind);
    if !matches!(kind, RuntimeKind::Image | RuntimeKind::Binary) {
        return None;
    }
    let program = ReadCache::new(program(session, function, index)?);
    let functions = functions_that_draw(&program)?;
    (!functions.is_empty()).then(|| findings::of_go(&listed(functions)))
}

/// The program that the function's command names.
pub(super) fn program(
    session: &Session,
    function: &StoredFunction,
    index: IndexId,
) -> Option<File> {
    let rootfs = StoredRootfs::open(session, index).ok()?;
    let tree = rootfs.tree().ok()?;
    let command = function.config.command.first()?;
    let path = function.environment.get("PATH").map_or("", String::as_str);
    let directories: Vec<&str> = match command.contains('/') {
        true => vec![""],
        false => path.split(':').collect(),
    };
    let workdir = Path::new(&function.config.workdir);
    let blob = directories
        .iter()
        .find_map(|directory| regular_file(&tree, &workdir.join(directory).join(command)))?;
    (blob.size <= PROGRAM_MAX).then(|| rootfs.open_content(blob.hash).ok())?
}

fn regular_file(tree: &Tree, path: &Path) -> Option<thaw_store::Blob> {
    match tree.node(tree.find_followed(path)?).content {
        Content::Regular(blob) => blob,
        _ => None,
    }
}

/// Names of the program's own functions that call `math/rand`, those of `main` first, then what
/// was inlined somewhere; `None` if it is not in Go.
fn functions_that_draw<'a>(program: impl ReadRef<'a>) -> Option<Vec<String>> {
    let code = Code::of(program)?;
    let functions = code.functions()?;
    let sources = sources(&code, &functions);
    let draws = |one: &&Function<'_>| {
        !is_of_library(one.name) && code.calls(one).any(|target| sources.contains(&target))
    };
    let found = functions.iter().filter(draws).map(|one| one.name);
    let found: BTreeSet<(bool, &str)> =
        found.map(|name| (!name.starts_with("main."), name)).collect();
    let found = found.into_iter().map(|(_, name)| thaw_sandbox::escape(name.as_bytes()));
    // The table names inlined functions, too; such a name says nothing of where.
    let is_called = |name: &str| functions.iter().any(|one| one.name == name);
    let inlined: BTreeSet<&str> = code.names().filter(|name| INLINED.contains(name)).collect();
    let inlined = inlined.into_iter().filter(|name| !is_called(name));
    Some(found.chain(inlined.map(|name| format!("code with {name} in it"))).collect())
}

/// The functions that give numbers of the generators that Go seeds.
///
/// A package has functions for its generator, and methods for all. Where the compiler inlines such
/// a function, a method is called, or `math/rand.globalRand` before it, since Go 1.20. A call of a
/// method alone tells nothing if no such function was inlined.
fn sources(code: &Code<'_>, functions: &[Function<'_>]) -> BTreeSet<u64> {
    let says_when = functions.iter().any(|one| one.name == "math/rand.globalRand");
    let methods = PACKAGES.map(|package| {
        let is_inlined = code.names().any(|name| is_for_all(name, package));
        is_inlined && !(says_when && package == PACKAGES[0])
    });
    let is_source = |name: &str| {
        PACKAGES.iter().zip(methods).any(|(package, methods)| {
            let method = || name.strip_prefix(package)?.strip_prefix("(*Rand).");
            is_for_all(name, package) || methods && method().is_some_and(|it| it != "Seed")
        })
    };
    functions.iter().filter(|one| is_source(one.name)).map(|one| one.entry).collect()
}

/// Whether a function of a package draws from its one generator. To make another one, and to
/// seed it, is no draw.
fn is_for_all(name: &str, package: &str) -> bool {
    let Some(own) = name.strip_prefix(package) else { return false };
    let makes = ["New", "Seed"].iter().any(|one| own.starts_with(one));
    let is_exported = own.starts_with(|first: char| first.is_ascii_uppercase());
    let is_method = own.trim_end_matches("[...]").contains('.');
    own == "globalRand" || is_exported && !makes && !is_method
}

/// Whether a function, or a variable, is of Go's own library.
pub(super) fn is_of_library(name: &str) -> bool {
    let package = name.split(['/', '.', '[', ':', '(']).next().unwrap_or(name);
    // A path that begins with a name of the Internet is somebody else's.
    let first = name.split('/').next().unwrap_or(name);
    let is_foreign = name.contains('/') && first.contains('.') && !first.contains(['(', '[']);
    !is_foreign && (package.is_empty() || LIBRARY.contains(&format!(" {package} ")))
}

/// A function, from its entry to where the next one begins.
struct Function<'a> {
    name: &'a str,
    entry: u64,
    end: u64,
}

/// The parts of a program in Go.
struct Code<'a> {
    table: &'a [u8],
    text: &'a [u8],
    /// Address of `text`.
    start: u64,
    /// Address that entries of the table begin to count from.
    base: u64,
}

impl<'a> Code<'a> {
    fn of(program: impl ReadRef<'a>) -> Option<Self> {
        let header = FileHeader64::<LittleEndian>::parse(program).ok()?;
        // Nothing is looked up in more: what is read stays in memory.
        if !(1..=SECTIONS_MAX).contains(&header.e_shnum(LittleEndian)) {
            return None;
        }
        let sections = header.sections(LittleEndian, program).ok()?;
        let section = |name: &str| Some(sections.section_by_name(LittleEndian, name.as_bytes())?.1);
        let table = section(".gopclntab").or_else(|| section(".data.rel.ro.gopclntab"))?;
        let (text, module) = (section(".text")?, section(".go.module"));
        let size = |section: &SectionHeader64<_>| section.sh_size(LittleEndian);
        let sizes = [Some(table), Some(text), module].into_iter().flatten().map(size);
        if sizes.fold(0, u64::saturating_add) > PROGRAM_MAX {
            return None;
        }
        let data = |section: &SectionHeader64<_>| section.data(LittleEndian, program).ok();
        let (table, start) = (data(table)?, text.sh_addr(LittleEndian));
        let in_header = word(table, 24).filter(|&base| base != 0);
        let in_module = || word(data(module?)?, TEXT_OF_MODULE);
        let base = in_header.or_else(in_module).filter(|&base| base != 0).unwrap_or(start);
        Some(Self { table, text: data(text)?, start, base })
    }

    /// Names of all functions, also of those that were inlined wherever they are called.
    fn names(&self) -> impl Iterator<Item = &'a str> {
        let at = |place| usize::try_from(word(self.table, place)?).ok();
        let range = at(32).zip(at(40)).map(|(from, to)| from..to);
        let names = range.and_then(|range| self.table.get(range)).unwrap_or_default();
        names.split(|&byte| byte == 0).filter_map(|name| std::str::from_utf8(name).ok())
    }

    /// All functions, by address.
    fn functions(&self) -> Option<Vec<Function<'a>>> {
        let is_known = MAGICS.contains(&half(self.table, 0)?) && *self.table.get(7)? == 8;
        let count = usize::try_from(word(self.table, 8)?).ok()?;
        if !is_known || count > FUNCTIONS_MAX {
            return None;
        }
        let names = self.table.get(usize::try_from(word(self.table, 32)?).ok()?..)?;
        let entries = self.table.get(usize::try_from(word(self.table, 64)?).ok()?..)?;
        // Behind the last entry is where its function ends.
        let address = |number: usize| self.base.checked_add(u64::from(half(entries, number * 8)?));
        let function = |number: usize| {
            let about = half(entries, number * 8 + 4)? as usize;
            let name = names.get(half(entries, about.checked_add(4)?)? as usize..)?;
            let end = name.iter().take(NAME_MAX).position(|&byte| byte == 0)?;
            let name = std::str::from_utf8(&name[..end]).ok()?;
            Some(Function { name, entry: address(number)?, end: address(number + 1)? })
        };
        // Sorted functions do not overlap, so that no code is looked at twice.
        let addresses: Vec<u64> = (0..=count).map(address).collect::<Option<_>>()?;
        if !addresses.is_sorted() {
            return None;
        }
        Some((0..count).filter_map(function).collect())
    }

    /// What a function calls, with some addresses that are no calls.
    fn calls(&self, function: &Function<'_>) -> impl Iterator<Item = u64> {
        let from = function.entry;
        let at = |address: u64| usize::try_from(address.wrapping_sub(self.start)).ok();
        let range = at(from).zip(at(function.end)).map(|(from, to)| from..to);
        let code = range.and_then(|range| self.text.get(range)).unwrap_or_default();
        let calls = code.windows(5).enumerate().filter(|(_, bytes)| bytes[0] == CALL);
        calls.map(move |(place, bytes)| {
            let distance = i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
            from.wrapping_add(place as u64 + 5).wrapping_add_signed(i64::from(distance))
        })
    }
}

pub(super) fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    /// Compiles a program in Go; `None`: there is no compiler.
    fn compiled(imports: &str, body: &str, options: &[&str]) -> Option<Vec<u8>> {
        if Command::new("go").arg("version").output().is_err() {
            eprintln!("skipped: there is no Go");
            return None;
        }
        let place = tempfile::tempdir().unwrap();
        let text = format!("package main\nimport (\n{imports}\n\"net/http\"\n)\n{body}\n");
        fs::write(place.path().join("main.go"), text).unwrap();
        fs::write(place.path().join("go.mod"), "module f\n\ngo 1.20\n").unwrap();
        let mut go = Command::new("go");
        go.current_dir(place.path()).env("GOFLAGS", "-buildvcs=false").env("GOTOOLCHAIN", "local");
        go.env("CGO_ENABLED", "0").arg("build").args(options).args(["-o", "f", "."]);
        let output = go.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(fs::read(place.path().join("f")).unwrap())
    }

    const SERVES: &str = "func main() { http.ListenAndServe(\":8080\", http.HandlerFunc(answer)) }\n\
        func answer(w http.ResponseWriter, _ *http.Request) {";

    #[test]
    fn functions_that_draw_are_found() {
        let body = format!("{SERVES} println(rand.Intn(9)) }}");
        let Some(program) = compiled("\"math/rand\"", &body, &["-ldflags=-s -w"]) else { return };
        assert_eq!(functions_that_draw(&program[..]), Some(vec!["main.answer".to_owned()]));
        // Position independent, and with symbols.
        let program = compiled("\"math/rand\"", &body, &["-buildmode=pie"]).unwrap();
        assert_eq!(functions_that_draw(&program[..]), Some(vec!["main.answer".to_owned()]));
    }

    #[test]
    fn what_was_inlined_is_found() {
        // Go 1.22 and later have the package.
        let root = Command::new("go").args(["env", "GOROOT"]).output();
        let root = root.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        if !root.is_ok_and(|root| Path::new(&root).join("src/math/rand/v2").exists()) {
            eprintln!("skipped: there is no math/rand/v2");
            return;
        }
        let body = format!("{SERVES} println(rand.Int64()) }}");
        let program = compiled("\"math/rand/v2\"", &body, &[]).unwrap();
        let expected = vec!["code with math/rand/v2.Int64 in it".to_owned()];
        assert_eq!(functions_that_draw(&program[..]), Some(expected));
    }

    #[test]
    fn sources_of_ones_own_are_none() {
        let source =
            "type S struct{}\nfunc (S) Int63() int64 { return 4 }\nfunc (S) Seed(int64) {}\n";
        let body = format!("{source}{SERVES} rand.Seed(4); println(rand.New(S{{}}).Intn(9)) }}");
        let Some(program) = compiled("\"math/rand\"", &body, &[]) else { return };
        assert_eq!(functions_that_draw(&program[..]), Some(Vec::new()));
    }

    #[test]
    fn what_the_library_draws_is_none_of_the_programs() {
        // To make a map takes a random number of the runtime.
        let map = "kept := map[int]int{}; for key := range kept { println(key) }";
        let body = format!("{SERVES} {map}; rand.Read(make([]byte, 9)) }}");
        let Some(program) = compiled("\"crypto/rand\"", &body, &[]) else { return };
        assert_eq!(functions_that_draw(&program[..]), Some(Vec::new()));
    }

    #[test]
    fn other_files_and_damaged_ones_are_none() {
        assert_eq!(functions_that_draw(&b"#!/bin/sh\n"[..]), None);
        let own = ReadCache::new(File::open("/proc/self/exe").unwrap());
        assert_eq!(functions_that_draw(&own), None);
        let table = |bytes: &[u8]| {
            let code = Code { table: bytes, text: &[CALL; 9], start: 0, base: 0 };
            code.functions().map(|all| all.len())
        };
        assert_eq!(table(&[]), None);
        let mut bytes = vec![0xff; 96];
        bytes[..8].copy_from_slice(&[0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8]);
        assert_eq!(table(&bytes), None);
        bytes[8..16].copy_from_slice(&4u64.to_le_bytes());
        bytes[32..40].copy_from_slice(&96u64.to_le_bytes());
        bytes[64..72].copy_from_slice(&80u64.to_le_bytes());
        // Its addresses fall.
        bytes[80..84].copy_from_slice(&[1, 0, 0, 0]);
        bytes.resize(128, 0);
        assert_eq!(table(&bytes), None);
        bytes[80..].fill(0);
        assert_eq!(table(&bytes), Some(4));
    }

    #[test]
    fn names_tell_whose_a_function_is() {
        for own in
            ["main.main", "main.f[...]", "f/pkg.Draw", "github.com/a/b.(*T).Draw", "gopkg.in/x.Y"]
        {
            assert!(!is_of_library(own), "{own}");
        }
        for library in [
            "net/http.(*Server).Serve",
            "runtime.main",
            "vendor/golang.org/x/net.f",
            "type:.eq.x",
            "go:buildid",
            "sort.Sort",
            "slices.Sort[go.shape.int]",
            "maps.keys[github.com/a/b.T]",
        ] {
            assert!(is_of_library(library), "{library}");
        }
        let [old, new] = PACKAGES;
        for source in ["math/rand.Intn", "math/rand.globalRand"] {
            assert!(is_for_all(source, old) && !is_for_all(source, new), "{source}");
        }
        assert!(is_for_all("math/rand/v2.N[...]", new));
        for other in ["New", "(*rngSource).Seed", "(*Rand).Int63", "Seed", "init", "NewSource"] {
            assert!(!is_for_all(&format!("{old}{other}"), old), "{other}");
        }
    }
}
