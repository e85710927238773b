//! The probe of Java as a jar: a zip file (APPNOTE.TXT of PKWARE, 4.3) of a manifest and one
//! class, neither of them compressed. `scripts/java-classes` makes the class.

use flate2::Crc;

const CLASS: &[u8] = include_bytes!("java/ThawProbe.class");
const MANIFEST: &[u8] = b"Manifest-Version: 1.0\r\nPremain-Class: ThawProbe\r\n\r\n";

/// The jar that `-javaagent` takes (java.lang.instrument, "Manifest Attributes").
pub(super) fn of_the_probe() -> Vec<u8> {
    zip(&[("META-INF/MANIFEST.MF", MANIFEST), ("ThawProbe.class", CLASS)])
}

fn zip(files: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut zip, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in files {
        let at = number(zip.len());
        let about = about(name, bytes);
        zip.extend([b"PK\x03\x04", &about[..], name.as_bytes(), bytes].concat());
        // Made on an unknown system; no comment, disk 0, no attributes.
        directory.extend([b"PK\x01\x02\x0a\x00", &about[..], &[0; 10], &at].concat());
        directory.extend(name.as_bytes());
    }
    let count = (files.len() as u16).to_le_bytes();
    let end = [b"PK\x05\x06", &[0; 4][..], &count, &count].concat();
    let (size, at) = (number(directory.len()), number(zip.len()));
    zip.extend([directory, end, size.to_vec(), at.to_vec(), vec![0; 2]].concat());
    zip
}

/// What the headers of a file have in common: from the version that is needed to the length of
/// extra fields.
fn about(name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut crc = Crc::new();
    crc.update(bytes);
    // Version 1.0, no flags, stored, midnight of 1 January 1980.
    let fixed = [10, 0, 0, 0, 0, 0, 0, 0, 0x21, 0];
    let size = number(bytes.len());
    let lengths = [(name.len() as u16).to_le_bytes(), [0; 2]].concat();
    [&fixed[..], &crc.sum().to_le_bytes(), &size, &size, &lengths].concat()
}

fn number(length: usize) -> [u8; 4] {
    (length as u32).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::java_classes::compiled;
    use std::process::Command;

    #[test]
    fn the_jar_is_a_zip_file() {
        let directory = tempfile::tempdir().unwrap();
        let jar = directory.path().join("probe.jar");
        std::fs::write(&jar, of_the_probe()).unwrap();
        let program = "import sys, zipfile\nz = zipfile.ZipFile(sys.argv[1])\n\
                       print(z.testzip(), *z.namelist())\n";
        let output = Command::new("python3").args(["-c", program]).arg(&jar).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(text, "None META-INF/MANIFEST.MF ThawProbe.class\n", "{output:?}");
    }

    #[test]
    fn the_class_is_what_its_source_gives() {
        let Some(directory) = compiled("probe") else { return };
        let made = std::fs::read(directory.path().join("ThawProbe.class")).unwrap();
        assert!(made == CLASS, "run scripts/java-classes probe and commit what it writes");
    }
}
