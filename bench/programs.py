#!/usr/bin/env python3
"""Traces of real programs, for `dray sim`: PostgreSQL, or a developer's files, at work on ext4 of 32 GiB. nbdkit's log
says what reaches the disk; no part of dray is involved.

    python3 bench/programs.py database|files -o FILE.csv [--seconds 1800] [--memory 334] [--work DIR]

As root. Needs nbdkit, nbdfuse, ext4 and loop devices; `database` PostgreSQL with pgbench, `files` git and sqlite3. The
programs have --memory MiB for themselves and the page cache (cgroup v1), so that not all reads are answered from it. What
is made before the clock starts is not in the trace, but lies on the disk.
"""

import argparse
import contextlib
import datetime
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

GROUP = Path("/sys/fs/cgroup/memory/dray-programs")
NOTED = re.compile(r"(\S+ \S+) connection=\d+ (Read|Write|Zero) id=\d+ offset=(\w+) count=(\w+)")
ROWS = 6_000_000
# A few rows are asked for most of the time, and they lie anywhere in the table.
QUERIES = f"""\\set a random_zipfian(1, {ROWS}, 1.05)
\\set b ((:a * 7919) % {ROWS} + 1)
\\set c ((:a * 104729) % {ROWS} + 1)
\\set d random(-5000, 5000)
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :d WHERE aid = :b;
SELECT abalance FROM pgbench_accounts WHERE aid = :c;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (1, 1, :b, :d, CURRENT_TIMESTAMP);
END;
"""
SETTINGS = "shared_buffers=64MB\ncheckpoint_timeout=60s\nmax_wal_size=256MB\nlisten_addresses=''\n"


def run(*command, **more):
    """Runs a command, or ends with what it said."""
    return subprocess.run([str(word) for word in command], check=True, **more)


class Disk:
    """ext4 over nbdfuse over nbdkit, mounted while this is open."""

    def __init__(self, work):
        self.work, self.mount, self.log = work, work / "disk", work / "log"
        self.undo = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as self.undo:
            self.make()
            self.undo = self.undo.pop_all()
        return self

    def make(self):
        image, socket, nbd = self.work / "image", self.work / "nbd.sock", self.work / "nbd"
        self.mount.mkdir()
        nbd.touch()
        with image.open("wb") as file:
            file.truncate(32 << 30)
        self.start("nbdkit", "-f", "-U", socket, "--filter=log", "file", image, f"logfile={self.log}")
        wait_for(socket.exists)
        self.start("nbdfuse", nbd, "--unix", socket)
        wait_for(lambda: nbd.stat().st_size)
        found = run("losetup", "--find", "--show", "--direct-io=on", nbd, capture_output=True, text=True)
        loop = found.stdout.strip()
        self.undo.callback(run, "losetup", "-d", loop)
        run("mkfs.ext4", "-q", loop)
        run("mount", loop, self.mount)
        self.undo.callback(run, "umount", self.mount)

    def start(self, *command):
        process = subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL)
        self.undo.callback(process.wait)
        self.undo.callback(process.terminate)

    def __exit__(self, *_):
        self.undo.close()

    def trace(self, began, ended, out):
        """Writes down what was logged between two moments."""
        rows = []
        with self.log.open() as lines:
            for line in lines:
                if found := NOTED.match(line):
                    at = datetime.datetime.fromisoformat(found[1]).timestamp()
                    op = "R" if found[2] == "Read" else "W"
                    rows.append((at - began, op, int(found[3], 0), int(found[4], 0)))
        rows = sorted(row for row in rows if 0 <= row[0] <= ended - began)
        with open(out, "w") as file:
            file.write("time_s,op,offset,length\n")
            file.writelines(f"{at:.6f},{op},{offset},{length}\n" for at, op, offset, length in rows)
        mib = {which: sum(row[3] for row in rows if row[1] == which) >> 20 for which in "RW"}
        print(f"{out}: {len(rows)} accesses in {ended - began:.0f} s, {mib['R']} MiB read, {mib['W']} MiB written")


def wait_for(ready):
    """Waits until `ready()`, ten seconds at most."""
    until = time.monotonic() + 10
    while not ready():
        if time.monotonic() > until:
            raise SystemExit("programs: nbdkit or nbdfuse does not come up")
        time.sleep(0.05)


class Database:
    """pgbench at 45 transactions a second: rows by Zipf's law, one in five its own TPC-B."""

    def __init__(self, disk):
        self.dir = disk.mount / "pg"
        self.bin = max(Path("/usr/lib/postgresql").glob("*/bin"))

    def sql(self, *command):
        run("runuser", "-u", "postgres", "--", *command, cwd="/", stdout=subprocess.DEVNULL)

    def prepare(self):
        shutil.copytree("/usr/lib", self.dir.parent / "lib", symlinks=True, ignore=shutil.ignore_patterns("python*", "gcc"))
        self.dir.mkdir()
        shutil.chown(self.dir, "postgres")
        self.sql(self.bin / "initdb", "-D", self.dir / "data")
        with (self.dir / "data/postgresql.conf").open("a") as file:
            file.write(SETTINGS + f"unix_socket_directories='{self.dir}'\n")
        (self.dir / "queries.sql").write_text(QUERIES)
        self.sql(self.bin / "pg_ctl", "-w", "-D", self.dir / "data", "-l", self.dir / "log", "start")
        self.sql("createdb", "-h", self.dir, "bench")
        self.sql("pgbench", "-h", self.dir, "-i", "-q", "-s", ROWS // 100_000, "bench")

    def work(self, seconds):
        self.sql("pgbench", "-n", "-h", self.dir, "-c", 4, "-R", 45, "-T", seconds, "-f",
                 f"{self.dir}/queries.sql@8", "-b", "tpcb-like@2", "bench")

    def end(self):
        """Nothing of it keeps the disk busy after this."""
        self.sql(self.bin / "pg_ctl", "-w", "-m", "fast", "-D", self.dir / "data", "stop")


class Files:
    """A log, a small database, clones, archives, copies and searches, each from time to time."""

    def __init__(self, disk):
        self.dir = disk.mount
        self.source = Path(__file__).resolve().parent.parent
        self.random = random.Random(1)

    def shell(self, command):
        subprocess.run(["bash", "-c", command], cwd=self.dir, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def prepare(self):
        for tree in ("share", "bin"):
            shutil.copytree(f"/usr/{tree}", self.dir / tree, symlinks=True)
        for n in range(40):
            self.shell(f"head -c {self.random.randint(1, 60)}M /dev/urandom > file{n}")
        self.shell("rm file?5 file?8; sqlite3 app.db 'create table t(id integer primary key, k int, v text); "
                   "create index i on t(k)'")

    def work(self, seconds):
        until, turn = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            turn += 1
            self.turn(turn)
            time.sleep(3)

    def turn(self, n):
        pick = self.random.randrange
        insert = "insert into t(k, v) values(abs(random()) % 100000, hex(randomblob(400)));"
        self.shell(f"sqlite3 app.db \"{insert * 5}\"; yes 'something happened' | head -n 20 >> app.log; sync app.log")
        if n % 7 == 0:
            self.shell("sqlite3 app.db 'delete from t where id in (select id from t order by random() limit 50)'")
        if n % 10 == 0:
            self.shell(f"rm -rf old; mv work old; git clone -q {self.source} work; grep -r fn work/crates")
        if n % 12 == 5:
            self.shell(f"cp file{pick(40)} copy{n % 6}")
        if n % 15 == 3:
            self.shell(f"tar cf - share/doc | gzip -1 > backup{n % 4}.tgz")
        if n % 25 == 4:
            self.shell(f"cat file{n % 40}")

    def end(self):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", choices=["database", "files"])
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--memory", type=int, default=334)
    parser.add_argument("--work")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dray-programs-", dir=args.work) as work:
        os.chmod(work, 0o755)
        with Disk(Path(work)) as disk:
            GROUP.mkdir(exist_ok=True)
            (GROUP / "memory.limit_in_bytes").write_text(str(args.memory << 20))
            (GROUP / "cgroup.procs").write_text(str(os.getpid()))
            programs = {"database": Database, "files": Files}[args.programs](disk)
            try:
                programs.prepare()
                os.sync()
                began = time.time()
                programs.work(args.seconds)
                ended = time.time()
            finally:
                programs.end()
                (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
            disk.trace(began, ended, args.out)
        GROUP.rmdir()


if __name__ == "__main__":
    main()
