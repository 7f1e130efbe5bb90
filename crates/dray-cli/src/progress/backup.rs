//! Follows a backup, a restore or a check of backups: these end together with the client that has
//! asked for them.

use crate::client::{Client, Reply};
use crate::output::Output;
use crate::show::units::{bytes, seconds};
use dray_api::{ApiResult, Ask, BackupProgress, ErrorKind, Event, Refusal};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Time between lines where there is no terminal.
const PERIOD: Duration = Duration::from_secs(5);

/// Sends `command`, shows how far it is and returns its result. Ctrl-C ends the work itself.
pub async fn follow<C: Ask>(client: &Client, command: C, output: &Output) -> ApiResult<C::Answer> {
    let mut call = client.start(command).await?;
    let mut display = Display::new(output);
    let done = loop {
        let reply = tokio::select! {
            reply = call.next() => reply,
            pressed = tokio::signal::ctrl_c() => {
                let cannot = |why| Refusal::new(ErrorKind::Internal, "cannot wait for Ctrl-C", why);
                pressed.map_err(cannot)?;
                Err(Refusal::new(ErrorKind::Cancelled, "ended", "Ctrl-C was pressed"))
            }
        };
        match reply {
            Ok(Reply::Continue(Event::Backup(progress))) => display.show(&progress),
            Ok(Reply::Continue(_)) => {}
            Ok(Reply::Break(answer)) => break Ok(answer),
            Err(why) => break Err(why),
        }
    };
    if let Some(bar) = display.bar {
        bar.finish_and_clear();
    }
    done
}

struct Display {
    output: Output,
    bar: Option<ProgressBar>,
    /// When a line was last printed; the first one comes after a period.
    told: Instant,
}

/// The sums over all images: to do, done, stored.
fn sums(progress: &BackupProgress) -> (u64, u64, u64) {
    progress.images.iter().fold((0, 0, 0), |(total, done, stored), image| {
        (total + image.bytes_total, done + image.bytes_done, stored + image.stored_bytes)
    })
}

fn words(progress: &BackupProgress) -> String {
    let (total, done, stored) = sums(progress);
    let rate = done as f64 / progress.elapsed_seconds.max(0.001);
    format!(
        "{} of {}, {} stored, {}/s",
        bytes(done),
        bytes(total),
        bytes(stored),
        bytes(rate as u64)
    )
}

impl Display {
    fn new(output: &Output) -> Self {
        let live = output.live && !output.json && !output.quiet;
        let bar = live.then(|| {
            let template = "{spinner:.cyan} {bar:28.cyan/dim} {percent:>3} %  {wide_msg}";
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(1).with_style(style.progress_chars("━╸─"))
        });
        Self { output: *output, bar, told: Instant::now() }
    }

    fn show(&mut self, progress: &BackupProgress) {
        if self.output.json {
            return self.output.json_line(&Event::Backup(progress.clone()));
        }
        let (total, done, _) = sums(progress);
        if let Some(bar) = &self.bar {
            bar.set_length(total.max(1));
            bar.set_position(done.min(total.max(1)));
            bar.set_message(words(progress));
        } else if total > 0 && self.told.elapsed() >= PERIOD {
            self.told = Instant::now();
            let time = seconds(progress.elapsed_seconds);
            self.output.note(&format!("[{time:>7}] {}", words(progress)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_api::ImageAmount;

    #[test]
    fn all_images_count() {
        let image = |bytes_total, bytes_done, stored_bytes| ImageAmount {
            bytes_total,
            bytes_done,
            stored_bytes,
            ..ImageAmount::default()
        };
        let images = vec![image(4 << 20, 1 << 20, 0), image(4 << 20, 3 << 20, 1 << 20)];
        let progress = BackupProgress { to: "nas".into(), elapsed_seconds: 2.0, images };
        assert_eq!(words(&progress), "4 MiB of 8 MiB, 1 MiB stored, 2 MiB/s");
    }
}
