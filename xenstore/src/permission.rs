//! Node permissions as GET_PERMS and SET_PERMS carry them.

use std::fmt;

/// What a domain may do with a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// `n`
    None,
    /// `r`
    Read,
    /// `w`
    Write,
    /// `b`
    Both,
}

impl Access {
    /// Whether reading is included.
    #[must_use]
    pub fn reads(self) -> bool {
        matches!(self, Self::Read | Self::Both)
    }

    /// Whether writing is included.
    #[must_use]
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Both)
    }
}

/// One entry of a node's permission list. In the first one `domid` is the node's owner, who may do
/// everything, and `access` is what domains not named later may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Permission {
    /// The domain.
    pub domid: u16,
    /// What it (or, in the first entry, everybody else) may do.
    pub access: Access,
}

impl Permission {
    /// An entry for `domid`.
    #[must_use]
    pub fn new(domid: u16, access: Access) -> Self {
        Self { domid, access }
    }

    /// From the wire form, for example `r5`.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (letter, domid) = text.split_first()?;
        let access = match letter {
            b'n' => Access::None,
            b'r' => Access::Read,
            b'w' => Access::Write,
            b'b' => Access::Both,
            _ => return None,
        };
        let domid = u16::try_from(crate::vbd::decimal(domid)?).ok()?;
        Some(Self { domid, access })
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.access {
            Access::None => 'n',
            Access::Read => 'r',
            Access::Write => 'w',
            Access::Both => 'b',
        };
        write!(f, "{letter}{}", self.domid)
    }
}
