//! Golden files: what was printed must be what `tests/cli/golden/NAME.txt` holds. After a wanted
//! change run the tests with `UPDATE_GOLDEN=1` and read the diff.

use std::path::Path;

/// Compares `text` with the golden file `name`.
pub fn check(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/cli/golden/{name}.txt"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, text).expect("the golden file can be written");
        return;
    }
    let wanted = std::fs::read_to_string(&path)
        .unwrap_or_else(|why| panic!("{}: {why}; UPDATE_GOLDEN=1 writes it", path.display()));
    assert!(
        text == wanted,
        "{name} has changed; UPDATE_GOLDEN=1 accepts it\n--- wanted\n{wanted}\n--- found\n{text}"
    );
}
