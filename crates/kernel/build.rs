//! Link arguments of the freestanding kernel ELF.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for arg in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--image-base=0x7e0000000000",
        "-Wl,-z,noexecstack",
        "-Wl,-z,max-page-size=4096",
        "-Wl,--build-id=sha1",
    ] {
        println!("cargo:rustc-link-arg-bins={arg}");
    }
}
