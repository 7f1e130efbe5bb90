//! Who may open which images over TCP, `[[nbd.client]]`.

/// A client, and what it may open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdClient {
    /// The DNS name in its certificate.
    pub name: String,
    /// Names of the images that it may read, or patterns of them.
    pub read: Vec<String>,
    /// Names of those that it may also write.
    pub write: Vec<String>,
}

/// Whether a client whose certificate has these names may read the image.
pub fn may_read(clients: &[NbdClient], names: &[String], image: &str) -> bool {
    may_write(clients, names, image) || any(clients, names, image, |client| &client.read)
}

/// Whether it may write it.
pub fn may_write(clients: &[NbdClient], names: &[String], image: &str) -> bool {
    any(clients, names, image, |client| &client.write)
}

fn any(
    clients: &[NbdClient],
    names: &[String],
    image: &str,
    list: impl Fn(&NbdClient) -> &Vec<String>,
) -> bool {
    let is_it = |client: &&NbdClient| names.iter().any(|n| n.eq_ignore_ascii_case(&client.name));
    let mut of_it = clients.iter().filter(is_it);
    of_it.any(|client| list(client).iter().any(|pattern| matches(pattern, image)))
}

/// Whether a name fits a pattern, in which `*` stands for any characters, or none.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    let mut parts: Vec<_> = parts.collect();
    // Without a star there is no last part, and nothing may be left.
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_whole_names() {
        for (pattern, name, fits) in [
            ("vm1", "vm1", true),
            ("vm1", "vm10", false),
            ("vm1", "a-vm1", false),
            ("vm1-*", "vm1-root", true),
            ("vm1-*", "vm1-", true),
            ("vm1-*", "vm2-root", false),
            ("*", "anything", true),
            ("", "anything", false),
            ("*-root", "vm1-root", true),
            ("*-root", "vm1-root.old", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn a_client_may_open_what_is_written_of_it_and_nothing_else() {
        let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let clients = [
            NbdClient { name: "backup".into(), read: list(&["vm*"]), write: list(&["vm2"]) },
            NbdClient { name: "other".into(), read: list(&[]), write: list(&["x"]) },
        ];
        let asked = |names: &[&str], image| {
            let names = list(names);
            (may_read(&clients, &names, image), may_write(&clients, &names, image))
        };
        assert_eq!(asked(&["Backup"], "vm1"), (true, false));
        assert_eq!(asked(&["backup"], "vm2"), (true, true));
        assert_eq!(asked(&["backup"], "x"), (false, false));
        assert_eq!(asked(&["nobody", "other"], "x"), (true, true));
        assert_eq!(asked(&["nobody"], "vm1"), (false, false));
        assert_eq!(asked(&[], "vm1"), (false, false));
    }
}
