//! One option of a QEMU command line, and the fields of its value.

use serde_json::Value;

use crate::options::pairs;

/// Options without a value; all others take the argument that follows.
const ALONE: [&str; 24] = [
    "-S",
    "-alt-grab",
    "-ctrl-grab",
    "-daemonize",
    "-enable-kvm",
    "-full-screen",
    "-h",
    "-help",
    "-no-acpi",
    "-no-fd-bootchk",
    "-no-hpet",
    "-no-kvm",
    "-no-quit",
    "-no-reboot",
    "-no-shutdown",
    "-no-user-config",
    "-nodefaults",
    "-nographic",
    "-only-migratable",
    "-preconfig",
    "-singlestep",
    "-snapshot",
    "-usb",
    "-win2k-hack",
];

/// An option, with one dash, and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opt {
    /// `-device`; empty for an argument that is no option (the file of a first disk).
    pub name: String,
    /// Its value, if it takes one.
    pub value: Option<String>,
}

impl Opt {
    /// Understands what follows the program's name.
    pub fn all(args: &[String]) -> Vec<Self> {
        let mut args = args.iter();
        let mut all = Vec::new();
        while let Some(arg) = args.next() {
            let name = arg.strip_prefix('-').filter(|rest| rest.starts_with('-')).unwrap_or(arg);
            all.push(match name.starts_with('-') {
                false => Self { name: String::new(), value: Some(arg.clone()) },
                true if ALONE.contains(&name) => Self { name: name.to_owned(), value: None },
                true => Self { name: name.to_owned(), value: args.next().cloned() },
            });
        }
        all
    }

    /// The value as text; empty without one.
    pub fn text(&self) -> &str {
        self.value.as_deref().unwrap_or_default()
    }

    fn json(&self) -> Option<Value> {
        serde_json::from_str(self.text()).ok().filter(Value::is_object)
    }

    /// The value's fields: those of JSON under dotted keys, as a `key=value` list has them. A first word without
    /// a key has an empty one.
    pub fn fields(&self) -> Vec<(String, String)> {
        match self.json() {
            Some(tree) => {
                let mut fields = Vec::new();
                flatten("", &tree, &mut fields);
                fields
            }
            None => pairs(self.text()),
        }
    }

    /// The value of one field.
    pub fn get(&self, key: &str) -> Option<String> {
        self.fields().into_iter().find(|(found, _)| found == key).map(|(_, value)| value)
    }

    /// What the first word says, which may have this key: the driver of a device, the type of a machine.
    pub fn first(&self, key: &str) -> Option<String> {
        let mut fields = self.fields();
        let unnamed = fields.first().is_some_and(|(found, _)| found.is_empty());
        if unnamed { Some(fields.swap_remove(0).1) } else { self.get(key) }
    }

    /// The same option with another value of a field of the outermost level.
    #[must_use]
    pub fn with(&self, key: &str, to: &str) -> Self {
        let value = match self.json() {
            Some(mut tree) => {
                tree[key] = to.into();
                tree.to_string()
            }
            None => {
                let mut fields = pairs(self.text());
                match fields.iter_mut().find(|(found, _)| found == key) {
                    Some((_, value)) => to.clone_into(value),
                    None => fields.push((key.to_owned(), to.to_owned())),
                }
                joined(&fields)
            }
        };
        Self { name: self.name.clone(), value: Some(value) }
    }
}

fn joined(fields: &[(String, String)]) -> String {
    let field = |(key, value): &(String, String)| {
        let value = value.replace(',', ",,");
        if key.is_empty() { value } else { format!("{key}={value}") }
    };
    fields.iter().map(field).collect::<Vec<_>>().join(",")
}

fn flatten(key: &str, value: &Value, fields: &mut Vec<(String, String)>) {
    let below = |name: &str| match key {
        "" => name.to_owned(),
        key => format!("{key}.{name}"),
    };
    match value {
        Value::Object(tree) => tree.iter().for_each(|(k, v)| flatten(&below(k), v, fields)),
        Value::Array(all) => {
            all.iter().enumerate().for_each(|(n, v)| flatten(&below(&n.to_string()), v, fields));
        }
        Value::String(text) => fields.push((key.to_owned(), text.clone())),
        other => fields.push((key.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<Opt> {
        Opt::all(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_have_the_values_that_qemu_gives_them() {
        let found =
            all("-S --nodefaults -append -x -device virtio-blk-pci,id=d,drive=a,,b disk.img");
        let names: Vec<_> = found.iter().map(|opt| (opt.name.as_str(), opt.text())).collect();
        let device = ("-device", "virtio-blk-pci,id=d,drive=a,,b");
        assert_eq!(
            names,
            [("-S", ""), ("-nodefaults", ""), ("-append", "-x"), device, ("", "disk.img")]
        );
        assert_eq!(found[3].first("driver").unwrap(), "virtio-blk-pci");
        assert_eq!(found[3].get("drive").unwrap(), "a,b");
        assert_eq!(found[3].with("drive", "x,y").text(), "virtio-blk-pci,id=d,drive=x,,y");
    }

    #[test]
    fn json_has_the_same_fields() {
        let opt = &all(r#"-device {"driver":"virtio-blk-pci","id":"d","x":{"y":[1,"z"]}}"#)[0];
        assert_eq!(opt.first("driver").unwrap(), "virtio-blk-pci");
        assert_eq!(
            (opt.get("x.y.0").unwrap(), opt.get("x.y.1").unwrap()),
            ("1".into(), "z".into())
        );
        assert_eq!(opt.with("drive", "a").get("drive").unwrap(), "a");
    }
}
