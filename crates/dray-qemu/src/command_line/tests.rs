use super::*;

fn line(text: &str) -> CommandLine {
    let args: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    CommandLine { directory: Some("/vm".into()), ..CommandLine::of_arguments(&args) }
}

fn disk(device: &str, nodes: &[&str]) -> MovedDisk {
    let value = |node: &&str| format!(r#"{{"driver":"nbd","node-name":"{node}"}}"#);
    MovedDisk { device: device.to_owned(), blockdevs: nodes.iter().map(value).collect() }
}

fn running(devices: &[&str]) -> Running {
    let devices = devices.iter().map(|id| (*id).to_owned()).collect();
    Running { machine: Some("pc-i440fx-7.2".to_owned()), devices }
}

fn same() -> Monitor<'static> {
    Monitor { here: Path::new("/run/q"), there: None }
}

fn text(waiting: &Waiting) -> String {
    let words = waiting.options.iter().flat_map(|(name, value)| [Some(name), value.as_ref()]);
    words.flatten().cloned().collect::<Vec<_>>().join(" ")
}

#[test]
fn disks_that_move_are_on_their_new_nodes_and_all_else_stays() {
    let found = line(
        "qemu-system-x86_64 -name vm1 -machine pc,accel=kvm -m 2G -incoming tcp:0:1 \
         -blockdev file,node-name=f,filename=/d/a.raw -blockdev raw,node-name=root,file=f \
         -blockdev file,node-name=iso,filename=cd.iso,read-only=on \
         -drive if=none,id=old,node-name=data,file=/d/b.raw,format=raw \
         -device virtio-blk-pci,id=disk0,drive=root -device virtio-blk-pci,id=disk1,drive=old \
         -device ide-cd,id=cd,drive=iso -device virtio-net-pci,id=gone \
         -qmp unix:/run/q,server=on,wait=off -daemonize",
    );
    let disks = [disk("disk0", &["root-nbd", "root"]), disk("disk1", &["data"])];
    let waiting = found.waiting(&running(&["disk0", "disk1", "cd"]), &disks, same());
    assert_eq!(
        text(&waiting),
        "-name vm1 -machine pc-i440fx-7.2,accel=kvm -m 2G \
         -blockdev file,node-name=iso,filename=cd.iso,read-only=on \
         -blockdev {\"driver\":\"nbd\",\"node-name\":\"root-nbd\"} \
         -blockdev {\"driver\":\"nbd\",\"node-name\":\"root\"} \
         -blockdev {\"driver\":\"nbd\",\"node-name\":\"data\"} \
         -device virtio-blk-pci,id=disk0,drive=root -device virtio-blk-pci,id=disk1,drive=data \
         -device ide-cd,id=cd,drive=iso -qmp unix:/run/q,server=on,wait=off -daemonize \
         -S -incoming defer"
    );
    assert_eq!(waiting.left_out, Vec::<String>::new());
    assert_eq!(waiting.reads, [PathBuf::from("cd.iso")]);
    assert_eq!(waiting.makes, [PathBuf::from("/run/q")]);
    assert_eq!(waiting.directory.as_deref(), Some(Path::new("/vm")), "cd.iso is relative");
}

#[test]
fn the_monitor_has_the_path_that_it_has_there() {
    let there = Monitor { there: Some(Path::new("/run/there")), ..same() };
    for (given, wanted) in [
        ("-qmp unix:/run/q,server=on,wait=off", "-qmp unix:/run/there,server=on,wait=off"),
        (
            "-chardev socket,id=m,path=/run/q,server=on -mon chardev=m,mode=control",
            "-chardev socket,id=m,path=/run/there,server=on -mon chardev=m,mode=control",
        ),
        ("-qmp unix:/run/other,server=on", "-qmp unix:/run/other,server=on"),
    ] {
        let found = line(&format!("qemu -machine type=pc {given}"));
        let waiting = found.waiting(&running(&[]), &[], there);
        let wanted = format!("-machine type=pc-i440fx-7.2 {wanted} -S -incoming defer");
        assert_eq!(text(&waiting), wanted);
        assert_eq!(waiting.directory, None);
    }
}

#[test]
fn what_the_command_line_does_not_tell_is_asked_for() {
    let found = line("qemu -netdev tap,id=n0,fd=3 -object secret,id=s,data=hunter2");
    let disks = [disk("hot", &["below", "top"])];
    let waiting = found.waiting(&running(&["hot", "nic"]), &disks, same());
    assert!(!text(&waiting).contains("hunter2"));
    assert!(text(&waiting).starts_with("-machine pc-i440fx-7.2 -blockdev"), "{}", text(&waiting));
    let left = waiting.left_out.join("\n");
    for part in
        ["-netdev (id n0)", "-object (id s)", "device nic was added", "id=hot and drive=top"]
    {
        assert!(left.contains(part), "{part}: {left}");
    }
    assert_eq!(waiting.left_out.len(), 4);
}
