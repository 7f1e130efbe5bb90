//! Migrations on a terminal.

use super::style::Style;
use super::summary::summary;
use super::table::{Align, fields, table};
use super::units::{about, bytes, rate, seconds, share_of};
use super::words::{amount, dirty, phase, share};
use dray_api::{MigrationState, MigrationStatus, Progress, Role};

/// How much of an id is shown in a list: enough to tell migrations of one host apart.
pub const SHORT_ID: usize = 8;

const fn word(state: MigrationState) -> &'static str {
    match state {
        MigrationState::Prepared => "prepared",
        MigrationState::Running => "running",
        MigrationState::Interrupted => "interrupted",
        MigrationState::Waiting => "waiting",
        MigrationState::Completed => "completed",
        MigrationState::Cancelled => "cancelled",
        MigrationState::Failed => "failed",
    }
}

const fn role(role: Role) -> &'static str {
    match role {
        Role::Source => "source",
        Role::Target => "target",
    }
}

/// The start of a migration's id.
pub fn short(id: dray_types::MigrationId) -> String {
    id.to_string()[..SHORT_ID].to_owned()
}

/// All migrations as a table.
pub fn list(migrations: &[MigrationStatus], style: Style) -> String {
    if migrations.is_empty() {
        return "no migrations\n".to_owned();
    }
    let head = [
        ("MIGRATION", Align::Left),
        ("MOVES", Align::Left),
        ("ROLE", Align::Left),
        ("PEER", Align::Left),
        ("STATE", Align::Left),
        ("PHASE", Align::Left),
        ("DONE", Align::Right),
        ("RATE", Align::Right),
        ("LEFT", Align::Right),
    ];
    let rows: Vec<[String; 9]> = migrations.iter().map(row).collect();
    table(head, &rows, style) + &paused(migrations, style) + &waiting(migrations, style)
}

/// Which fetch nothing before the operator says so, and where that is said.
fn paused(migrations: &[MigrationStatus], style: Style) -> String {
    let waits =
        |one: &&MigrationStatus| one.progress.paused && one.state == MigrationState::Running;
    let line = |one: &MigrationStatus| {
        let (id, command) =
            (short(one.migration), format!("dray backfill start {}", short(one.migration)));
        let host =
            if one.role == Role::Source { format!(" on {}", one.peer) } else { String::new() };
        format!("\n{} waits for `{command}`{host}\n", style.warn(&id))
    };
    migrations.iter().filter(waits).map(line).collect()
}

/// What those wait for that cannot be brought back or do not get further, and what ends that.
fn waiting(migrations: &[MigrationStatus], style: Style) -> String {
    let mut text = String::new();
    let waits = |state| matches!(state, MigrationState::Waiting | MigrationState::Running);
    for migration in migrations.iter().filter(|one| waits(one.state)) {
        let Some(error) = &migration.error else { continue };
        let id = style.warn(&short(migration.migration));
        let hint = error.hint.as_ref().map(|hint| format!("  {hint}\n")).unwrap_or_default();
        text += &format!("\n{id} waits: {}\n{hint}", error.why);
    }
    text
}

fn row(migration: &MigrationStatus) -> [String; 9] {
    let progress = &migration.progress;
    let running = migration.state == MigrationState::Running;
    let when_running = |text: String| if running { text } else { "-".to_owned() };
    let left = progress.seconds_left.map_or("-".to_owned(), about);
    let done = match migration.state {
        MigrationState::Prepared | MigrationState::Waiting => "-".to_owned(),
        // What was written while it was copied may never have had to be sent.
        MigrationState::Completed => "100 %".to_owned(),
        _ => share_of(progress.total.bytes_done, progress.total.bytes_total),
    };
    [
        short(migration.migration),
        migration.moves(),
        role(migration.role).to_owned(),
        migration.peer.clone(),
        word(migration.state).to_owned(),
        match migration.state {
            // How far it was is in what cannot be read.
            MigrationState::Waiting => "-".to_owned(),
            _ => phase(progress),
        },
        done,
        when_running(rate(progress.rate)),
        when_running(left),
    ]
}

/// One migration at length.
pub fn detail(migration: &MigrationStatus, style: Style) -> String {
    let vm = migration.vm.as_deref().unwrap_or("images");
    let way = match migration.role {
        Role::Source => format!("to {}", migration.peer),
        Role::Target => format!("from {}", migration.peer),
    };
    let state = match migration.state {
        MigrationState::Failed => style.bad(word(migration.state)),
        MigrationState::Interrupted | MigrationState::Waiting => style.warn(word(migration.state)),
        state => word(state).to_owned(),
    };
    let state = match waits(migration) {
        Some(waits) => format!("{state}; {waits}"),
        None => state,
    };
    let running = migration.state == MigrationState::Running;
    let mut lines = vec![("migration", migration.migration.to_string()), ("state", state)];
    if migration.state != MigrationState::Waiting {
        lines.push(("strategy", migration.progress.strategy.to_string()));
    }
    if let Some(error) = &migration.error {
        lines.push(("reason", error.to_string()));
        lines.extend(error.hint.clone().map(|hint| ("hint", hint)));
    }
    let moves = !matches!(migration.state, MigrationState::Prepared | MigrationState::Waiting);
    if migration.summary.is_none() && moves {
        lines.extend(progress_lines(&migration.progress, running));
    }
    let mut text = format!("{}\n\n{}", style.bold(&format!("{vm} {way}")), fields(&lines, style));
    if let Some(end) = &migration.summary {
        text += &format!("\n{}", summary(end, true, style));
    }
    text
}

/// What a target waits for, and how long already.
fn waits(migration: &MigrationStatus) -> Option<String> {
    let time = about(migration.waiting_seconds? as f64);
    let peer = &migration.peer;
    Some(match migration.state {
        MigrationState::Prepared => format!("waits for {peer} to begin, for {time} now"),
        _ => format!("waits for {peer} to come back, for {time} now"),
    })
}

fn progress_lines(progress: &Progress, running: bool) -> Vec<(&'static str, String)> {
    let total = &progress.total;
    let share = match total.bytes_total {
        0 => bytes(total.bytes_done),
        _ => format!("{} ({})", amount(total), share(total)),
    };
    let done = format!("{share} in {}", seconds(progress.elapsed_seconds));
    let mut lines = vec![
        ("phase", format!("{}, round {}", phase(progress), progress.round)),
        ("done", done),
        ("missing", bytes(total.bytes_missing)),
        ("dirty", dirty(progress)),
        ("memory", bytes(progress.memory_bytes)),
    ];
    if running {
        lines.extend(speed_lines(progress));
    }
    lines
}

fn speed_lines(progress: &Progress) -> Vec<(&'static str, String)> {
    let link = if progress.link_up { "up" } else { "down: waiting for the peer" };
    let limit = progress.bandwidth.map_or("none".to_owned(), |limit| limit.to_string());
    let mut lines =
        vec![("rate", rate(progress.rate)), ("limit", limit), ("link", link.to_owned())];
    lines.extend(progress.seconds_left.map(|left| ("left", format!("about {}", about(left)))));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_api::{Amounts, Strategy};
    use dray_types::MigrationId;

    /// Zeros and blocks that were written again need not be sent: the amounts of a migration that is over do not
    /// have to meet.
    #[test]
    fn a_completed_migration_is_done() {
        let mut progress = Progress::new(MigrationId(1), Strategy::Hybrid);
        progress.total = Amounts { bytes_total: 100, bytes_done: 95, ..progress.total };
        let mut migration = MigrationStatus {
            migration: MigrationId(1),
            role: Role::Source,
            peer: "hostb".into(),
            vm: Some("vm1".into()),
            state: MigrationState::Completed,
            started_unix_ms: 0,
            progress,
            summary: None,
            error: None,
            waiting_seconds: None,
            subject: None,
        };
        assert_eq!(row(&migration)[6], "100 %");
        migration.state = MigrationState::Running;
        assert_eq!(row(&migration)[6], "95 %");
        migration.state = MigrationState::Prepared;
        assert_eq!(row(&migration)[6], "-");
        migration.state = MigrationState::Waiting;
        assert_eq!(row(&migration)[4..7], ["waiting", "-", "-"]);
        let shown = detail(&migration, Style::default());
        assert!(!shown.contains("strategy") && !shown.contains("missing"), "{shown}");
    }
}
