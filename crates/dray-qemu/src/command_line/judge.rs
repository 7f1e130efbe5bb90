//! What of an option can be repeated at another host, and what it needs there.

use std::path::PathBuf;

use dray_types::text::harmless;

use super::option::Opt;

/// Fields that name a descriptor which whoever started QEMU has passed to it.
const DESCRIPTORS: [&str; 6] = ["fd", "fds", "vhostfd", "vhostfds", "sockfd", "tpmfd"];
/// Fields that hold a secret in clear text.
const SECRETS: [&str; 3] = ["password", "passwd", "passphrase"];
/// Devices that are parts of one host.
const OF_HOST: [&str; 6] =
    ["vfio-pci", "vfio-ap", "vfio-ccw", "usb-host", "scsi-generic", "scsi-block"];
/// Options whose whole value is a file that QEMU reads.
const READ: [&str; 11] = [
    "-kernel",
    "-initrd",
    "-dtb",
    "-bios",
    "-pflash",
    "-cdrom",
    "-fda",
    "-fdb",
    "-readconfig",
    "-mtdblock",
    "-sd",
];
/// Options with fields that name files which QEMU reads, and those fields.
const READ_FIELDS: [(&str, &[&str]); 8] = [
    ("-drive", &["file", "file.filename"]),
    ("-blockdev", &["filename", "file.filename"]),
    ("-device", &["romfile"]),
    ("-object", &["file", "dir"]),
    ("-smbios", &["file"]),
    ("-acpitable", &["file", "data"]),
    ("-fw_cfg", &["file"]),
    ("-tpmdev", &["path"]),
];
/// Options that may open a socket.
const SERVERS: [&str; 8] =
    ["-qmp", "-qmp-pretty", "-monitor", "-serial", "-parallel", "-chardev", "-vnc", "-gdb"];

/// Why an option cannot be repeated; its value is not shown, which may hold a secret.
pub(super) fn cannot(opt: &Opt) -> Option<String> {
    let fields = opt.fields();
    let what = shown(opt);
    if opt.text().chars().any(char::is_control) {
        return Some(format!("{what} holds a control character"));
    }
    let holds_secret = |(key, value): &(String, String)| {
        let last = key.rsplit('.').next().unwrap_or_default();
        SECRETS.contains(&last) && !matches!(value.as_str(), "on" | "off" | "")
    };
    let is_secret_object = opt.name == "-object"
        && opt.first("qom-type").is_some_and(|kind| kind.starts_with("secret"));
    let data = is_secret_object && opt.get("data").is_some();
    if data || fields.iter().any(holds_secret) || holds_credential(opt.text()) {
        return Some(format!("{what} holds a secret, which dray does not print"));
    }
    let is_descriptor = |(key, value): &(String, String)| {
        let last = key.rsplit('.').next().unwrap_or_default();
        DESCRIPTORS.contains(&last) || value.starts_with("/dev/fdset/")
    };
    if opt.name == "-add-fd" || fields.iter().any(is_descriptor) {
        return Some(format!(
            "{what} uses a descriptor that the program which started QEMU has passed"
        ));
    }
    let driver = opt.first("driver").filter(|_| opt.name == "-device");
    if driver.is_some_and(|driver| OF_HOST.contains(&driver.as_str())) {
        return Some(format!("{what} is a device of the host, which does not move"));
    }
    if opt.name == "-chroot" {
        return Some(format!("{what} needs more rights than QEMU has when it runs"));
    }
    if opt.name == "-snapshot" {
        return Some(format!("{what} throws away what the guest writes: the disks differ there"));
    }
    if opt.name.is_empty() || opt.name.starts_with("-hd") {
        return Some(
            "a disk that is given without -blockdev or -drive: dray cannot name it".to_owned(),
        );
    }
    None
}

/// `user:password@` in a URL, or a credential for the guest's systemd.
fn holds_credential(text: &str) -> bool {
    let authority = |rest: &str| rest.split(['/', ',', '"']).next().unwrap_or_default().to_owned();
    let mut urls = text.split("://").skip(1).map(authority);
    let with_password =
        urls.any(|authority| authority.split_once('@').is_some_and(|(user, _)| user.contains(':')));
    with_password || text.contains("io.systemd.credential")
}

/// An option as it may be shown: with its id, and nothing else of its value.
pub(super) fn shown(opt: &Opt) -> String {
    let id = opt.get("id").or_else(|| opt.get("node-name"));
    harmless(match id {
        Some(id) => format!("{} (id {id})", opt.name),
        None => opt.name.clone(),
    })
}

/// The files that QEMU reads for an option.
pub(super) fn reads(opt: &Opt) -> Vec<PathBuf> {
    let whole = READ.contains(&opt.name.as_str()).then(|| opt.text().to_owned());
    let keys = READ_FIELDS.iter().filter(|(name, _)| *name == opt.name).flat_map(|(_, keys)| *keys);
    let fields = keys.filter_map(|key| opt.get(key));
    whole.into_iter().chain(fields).filter(|name| is_file_name(name)).map(PathBuf::from).collect()
}

/// Not the name of something else that `-drive file=` takes.
fn is_file_name(name: &str) -> bool {
    let protocol = name.split_once(':').is_some_and(|(before, _)| !before.contains('/'));
    !name.is_empty() && !protocol
}

/// The path of the socket that an option has QEMU make.
pub(super) fn makes(opt: &Opt) -> Option<PathBuf> {
    if !SERVERS.contains(&opt.name.as_str()) {
        return None;
    }
    let on = |key: &str| matches!(opt.get(key).as_deref(), Some("on" | "true"));
    let bare = |word: &str| opt.fields().iter().any(|(key, value)| key.is_empty() && value == word);
    let serves = on("server") || bare("server");
    let first = opt.first("").unwrap_or_default();
    if let Some(path) = first.strip_prefix("unix:") {
        return (serves || opt.name == "-vnc").then(|| path.into());
    }
    let path = opt.get("path").or_else(|| opt.get("addr.path"))?;
    (opt.name == "-chardev" && serves).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opt(text: &str) -> Opt {
        let args: Vec<_> = text.splitn(2, ' ').map(str::to_owned).collect();
        Opt::all(&args).remove(0)
    }

    #[test]
    fn what_cannot_be_repeated_is_named_and_no_secret_is_shown() {
        for text in [
            "-object secret,id=s0,data=hunter2",
            r#"-object {"qom-type":"secret","id":"s0","data":"hunter2"}"#,
            "-spice port=5900,password=hunter2",
            "-drive file=http://me:hunter2@host/x,if=none",
            "-smbios type=11,value=io.systemd.credential:x=hunter2",
            "-blockdev driver=iscsi,node-name=i,password=hunter2",
        ] {
            let why = cannot(&opt(text)).unwrap_or_else(|| panic!("{text}"));
            assert!(why.contains("secret") && !why.contains("hunter2"), "{why}");
        }
        let tap = cannot(&opt("-netdev tap,id=n0,fd=33,vhost=on")).unwrap();
        assert_eq!(
            tap,
            "-netdev (id n0) uses a descriptor that the program which started QEMU has passed"
        );
        assert!(cannot(&opt("-blockdev driver=file,node-name=x,filename=/dev/fdset/3")).is_some());
        assert!(cannot(&opt("-device vfio-pci,host=01:00.0,id=gpu")).unwrap().contains("(id gpu)"));
        assert!(cannot(&opt("disk.img")).is_some());
        for text in [
            "-object secret,id=s0,file=/etc/key",
            "-vnc :1,password=on",
            "-device virtio-net-pci,netdev=n0",
            "-netdev user,id=n0",
        ] {
            assert_eq!(cannot(&opt(text)), None, "{text}");
        }
    }

    #[test]
    fn the_files_and_sockets_of_an_option() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(reads(&opt("-kernel /boot/vmlinuz")), paths(&["/boot/vmlinuz"]));
        assert_eq!(reads(&opt("-drive if=pflash,file=/a,,b,readonly=on")), paths(&["/a,b"]));
        assert_eq!(reads(&opt("-drive if=none,file=nbd:unix:/x")), paths(&[]));
        assert_eq!(
            reads(&opt("-blockdev raw,node-name=a,file.driver=file,file.filename=x.iso")),
            [PathBuf::from("x.iso")]
        );
        let of = |text| makes(&opt(text)).map(|path| path.to_string_lossy().into_owned());
        assert_eq!(of("-qmp unix:/run/q,server=on,wait=off").as_deref(), Some("/run/q"));
        assert_eq!(of("-monitor unix:/run/m,server,nowait").as_deref(), Some("/run/m"));
        assert_eq!(of("-chardev socket,id=c,path=/run/c,server=on").as_deref(), Some("/run/c"));
        assert_eq!(of("-chardev socket,id=c,path=/run/c"), None);
        assert_eq!(of("-vnc unix:/run/v").as_deref(), Some("/run/v"));
        assert_eq!(of("-serial file:/run/s"), None);
    }
}
