//! The text that names a target: `raw:PATH`, a bare absolute or relative path, `null:SIZE`,
//! `memory:SIZE` or `script:SOCKET`.

use std::fmt;
use std::path::PathBuf;

use super::{SECTOR, TargetError};

/// A parsed target. Displays as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSpec {
    text: String,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Raw(PathBuf),
    Null(u64),
    Memory(u64),
    Script(PathBuf),
}

const SIZE: &str =
    "a size in bytes, or with K, M, G or T, that is a multiple of 512, for example memory:64M";

impl TargetSpec {
    /// Parses `text`; touches no file.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        let fail = |expected| TargetError::Spec {
            value: text.into(),
            expected,
        };
        let size = |digits| parse_size(digits).ok_or_else(|| fail(SIZE));
        let path = |path: &str| {
            if path.is_empty() || path.contains('\0') {
                return Err(fail("a path"));
            }
            Ok(PathBuf::from(path))
        };
        let kind = match text.split_once(':') {
            Some(("raw", rest)) => Kind::Raw(path(rest)?),
            Some(("null", rest)) => Kind::Null(size(rest)?),
            Some(("memory", rest)) => Kind::Memory(size(rest)?),
            Some(("script", rest)) => Kind::Script(path(rest)?),
            // A colon later than the first slash belongs to the path.
            Some((word, _)) if !word.contains('/') => {
                return Err(fail(
                    "a path, raw:PATH, null:SIZE, memory:SIZE or script:SOCKET",
                ));
            }
            _ => Kind::Raw(path(text)?),
        };
        Ok(Self {
            text: text.into(),
            kind,
        })
    }
}

impl fmt::Display for TargetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G', 'T', 'k', 'm', 'g', 't']);
    let shift = match text.strip_prefix(digits)? {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return None,
    };
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let size = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    let usable = size >= SECTOR && size.is_multiple_of(SECTOR) && i64::try_from(size).is_ok();
    usable.then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_understood() {
        let kind = |text| TargetSpec::parse(text).unwrap().kind;
        assert_eq!(kind("/a/b.img"), Kind::Raw("/a/b.img".into()));
        assert_eq!(kind("b.img"), Kind::Raw("b.img".into()));
        assert_eq!(kind("./odd:name"), Kind::Raw("./odd:name".into()));
        assert_eq!(kind("raw:odd:name"), Kind::Raw("odd:name".into()));
        assert_eq!(kind("null:512"), Kind::Null(512));
        assert_eq!(kind("memory:3M"), Kind::Memory(3 << 20));
        assert_eq!(kind("memory:8388607T"), Kind::Memory(8_388_607 << 40));
        assert_eq!(kind("script:/s"), Kind::Script("/s".into()));
    }

    #[test]
    fn errors_name_the_value_and_what_was_expected() {
        for text in [
            "",
            "raw:",
            "null:",
            "null:0",
            "null:513",
            "null:-1",
            "null:+512",
            "null:1MM",
            "memory:8388608T",
            "memory:99999999999999999999",
            "qcow2:/x",
            "script:",
            "a\0b",
        ] {
            let message = TargetSpec::parse(text).unwrap_err().to_string();
            assert!(message.contains(&format!("{text:?}")), "{message}");
            assert!(message.contains("expected "), "{message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }
}
