//! The command line of the QEMU that waits at the target, made from that of the QEMU that runs here.

use dray_api::{ApiResult, ErrorKind, Prepare, PreparedImage, Refusal, Subject, WaitingCommand};
use dray_host::owner;
use dray_qemu::command_line::{CommandLine, Monitor, MovedDisk, Running};
use dray_vm::picture::Picture;
use dray_vm::qemu_error;

/// What starts the QEMU that waits, if it was asked for.
pub async fn of(
    command: &Prepare,
    picture: Option<&Picture>,
    images: &[PreparedImage],
) -> ApiResult<Option<WaitingCommand>> {
    let what = "cannot make the command line of the waiting QEMU";
    let (true, Some(picture), Subject::Vm { qmp }) =
        (command.command_line, picture, &command.subject)
    else {
        return Ok(None);
    };
    let Some(pid) = picture.qmp().pid() else {
        let why = "it is not known which process answers for the vm";
        let hint = "start the vm so that its QEMU makes the socket itself, or leave out --script";
        return Err(Refusal::new(ErrorKind::Unsupported, what, why).hint(hint));
    };
    let failed = |why: dray_qemu::Error| qemu_error(what, &why);
    let line = CommandLine::of_process(pid).map_err(failed)?;
    let running = Running::of(picture.qmp()).await.map_err(failed)?;
    let moved = |image: &PreparedImage| {
        let device = image.device.clone()?;
        (!image.blockdev.is_empty())
            .then(|| MovedDisk { device, blockdevs: image.blockdev.clone() })
    };
    let disks: Vec<MovedDisk> = images.iter().filter_map(moved).collect();
    let monitor = Monitor { here: qmp, there: command.target_qmp.as_deref() };
    let waiting = line.waiting(&running, &disks, monitor);
    let qmp_there = command.target_qmp.as_ref().unwrap_or(qmp);
    Ok(Some(WaitingCommand {
        vm: picture.name.clone(),
        pid,
        user: user_there(command, pid),
        qmp: waiting.makes.contains(qmp_there).then(|| qmp_there.clone()),
        program: waiting.program,
        options: waiting.options,
        left_out: waiting.left_out,
        reads: waiting.reads,
        makes: waiting.makes,
        directory: waiting.directory,
    }))
}

/// As whom QEMU runs there: as who runs it here, unless the disks' files shall belong to somebody else.
fn user_there(command: &Prepare, pid: i32) -> Option<String> {
    let wanted = command.owner.as_deref().and_then(|owner| owner.split(':').next());
    wanted.map(str::to_owned).or_else(|| owner::of_process(pid))
}
