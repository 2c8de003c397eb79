//! To be filled by the first commits.
