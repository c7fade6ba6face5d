"""`python -m collectives run`, and how commands are found."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives import cli
from collectives.cli import run as launcher

# `tell` writes a line at once and whole, so that lines of several ranks do not mix.
PRELUDE = """
import os, sys, time, signal
from collectives.bootstrap import detect
comm = detect()
def tell(what):
    os.write(1, f"{what}\\n".encode())
"""


def hear():
    """Signals are heard, also where whoever started pytest ignores them."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def launch(tmp_path):
    """Starts the launcher; with `code`, on a script that runs it once the ranks have met."""
    started = []

    def start(*arguments, code=None, **options):
        command = [sys.executable, "-m", "collectives", "run", *arguments]
        if code is not None:
            script = tmp_path / "script.py"
            script.write_text(PRELUDE + textwrap.dedent(code))
            command.append(str(script))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": hear}
        process = subprocess.Popen(
            command,
            text=True,
            env={name: v for name, v in os.environ.items() if not name.startswith("COLLECTIVES_")},
            **(pipes | options),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process, timeout=20):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ranks_meet(launch):
    code = """
    got = comm.all_gather(b"%d" % comm.rank)
    print(comm.kind, got, os.environ["COLLECTIVES_LOCAL_RANK"], sys.argv[1:])
    comm.close()
    """
    process = launch("-n", "3", "--label", code=code)
    status, out, err = finish(process)
    assert (status, err) == (0, "")
    expected = "tcp [b'0', b'1', b'2'] {} []"
    assert sorted(out.splitlines()) == [f"[{r}] {expected.format(r)}" for r in range(3)]


@pytest.mark.parametrize("full", [False, True])
def test_ranks_end_where_nobody_takes_what_they_write(launch, full):
    """A pipe that the launcher no longer reads would stop them for ever."""
    if full:
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    code = "while True: os.write(1, b'x' * 99 + bytes([10]))"
    process = launch("-n", "2", "--label", code=code, stdout=target)
    os.close(target)
    status, _, err = finish(process)
    assert status == 1
    assert "BrokenPipeError" in err  # of the ranks
    assert ("writes cannot be passed on: No space left on device" in err) is full
    assert "Exception" not in err


@pytest.mark.parametrize("blocks", [True, False])
def test_what_ranks_have_written_is_passed_on_however_slowly_it_is_read(blocks):
    """Also long after they have ended, and into a pipe that does not block."""
    reader, target = os.pipe()
    os.set_blocking(target, blocks)
    source, into = os.pipe()
    printer = launcher._Printer(os.fdopen(source, "rb"), target, 3, threading.Lock())
    printer.start()
    ranks = threading.Thread(target=write_all, args=(into, b"twelve bytes" * 2000))
    ranks.start()
    ending = threading.Thread(target=printer.finish, args=(time.monotonic(), 0.1))
    ending.start()
    ending.join(0.5)
    assert ending.is_alive()  # 24 KiB a line, of which a pipe takes two or three
    with os.fdopen(reader, "rb") as lines:
        got = [lines.readline() for _ in range(20)]
    ending.join(20)
    assert not ending.is_alive() and got == [b"[3] " + b"twelve bytes" * 2000 + b"\n"] * 20
    ranks.join()
    os.close(target)


def test_lines_of_two_streams_do_not_mix_in_one_file(launch):
    code = """
    for _ in range(200):
        os.write(1, b"o" * 9000 + b"\\n")
        os.write(2, b"e" * 99 + b"\\n")
    """
    process = launch("-n", "2", "--label", code=code, stderr=subprocess.STDOUT)
    status, out, _ = finish(process)
    assert status == 0 and len(out.splitlines()) == 800
    assert set(out.splitlines()) == {f"[{r}] {t}" for r in "01" for t in ("o" * 9000, "e" * 99)}


def test_a_stream_that_nobody_reads_does_not_hold_the_other_back(launch):
    code = """
    import threading
    threading.Thread(target=os.write, args=(1, b"o\\n" * (1 << 19)), daemon=True).start()
    time.sleep(0.3)  # the launcher is at it
    os.write(2, b"heard\\n")
    comm.barrier()
    """
    process = launch("-n", "2", "--label", code=code)
    heard = []
    reader = threading.Thread(target=lambda: heard.extend(next(process.stderr) for _ in range(2)))
    reader.start()
    reader.join(15)
    assert sorted(heard) == ["[0] heard\n", "[1] heard\n"]


def write_all(into, line):
    with os.fdopen(into, "wb") as file:
        file.writelines([line + b"\n"] * 20)


def test_a_pipe_that_something_keeps_open_is_not_waited_for():
    source, into = os.pipe()
    printer = launcher._Printer(os.fdopen(source, "rb"), 2, 3, threading.Lock())
    printer.start()
    began = time.monotonic()
    printer.finish(began, 0.2)
    assert 0.2 <= time.monotonic() - began < 10 and printer.is_alive()
    os.close(into)
    printer.join(20)
    assert not printer.is_alive()


def test_nodes_and_timeout(launch):
    code = """
    node, local = os.environ["COLLECTIVES_NODE"], os.environ["COLLECTIVES_LOCAL_RANK"]
    tell(f"{comm.rank} {node} {local} {comm.timeout}")
    comm.close()
    """
    process = launch("-n", "5", "--nodes", "2", "--timeout", "12", code=code)
    status, out, err = finish(process)
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "0 0 0 12.0",
        "1 0 1 12.0",
        "2 0 2 12.0",
        "3 1 0 12.0",
        "4 1 1 12.0",
    ]


def test_modules_arguments_and_input(launch):
    process = launch("-n", "1", "-m", "json.tool", "--compact", stdin=subprocess.PIPE)
    out, _ = process.communicate('{"a":  1}', timeout=20)
    assert (process.returncode, out) == (0, '{"a":1}\n')


@pytest.mark.parametrize(
    "before",
    [["--"], ["-m"], ["--", "-m"], ["-m", "--"]],
)
def test_options_may_be_ended(launch, tmp_path, before):
    """As in `env -- program`; a later -- is the program's."""
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])")
    name = "program" if "-m" in before else "program.py"
    process = launch("-n", "1", *before, name, "-n", "--", "2", cwd=tmp_path)
    assert finish(process) == (0, "['-n', '--', '2']\n", "")


def test_the_secret_is_not_on_a_command_line(launch):
    code = """
    secret = os.environ["COLLECTIVES_SECRET"]
    lines = [open(f"/proc/{pid}/cmdline").read() for pid in (os.getpid(), os.getppid())]
    print(len(secret), any(secret in line for line in lines))
    """
    assert finish(launch("-n", "1", code=code))[1] == "64 False\n"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("sys.exit(7)", 7, "exited with status 7"),
        ("raise ValueError('no')", 1, "exited with status 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
        ("os.abort()", 134, "was ended by SIGABRT"),
        # Gone for the others at once, while its process takes longer to end than theirs.
        ("comm._sock.close(); time.sleep(0.8); sys.exit(9)", 9, "exited with status 9"),
    ],
)
def test_the_first_rank_to_fail_is_named_and_the_others_stopped(launch, how, status, says):
    code = f"""
    comm.barrier()
    if comm.rank == 2:
        {how}
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()  # rank 0 fails here because of rank 2, and is not the one to name
    """
    begin = time.monotonic()
    got, _, err = finish(launch("-n", "3", code=code))
    assert got == status
    # In the middle of a line, where rank 0 is still writing its traceback.
    (line,) = re.findall(r"collectives run: .*", err)
    assert line.startswith("collectives run: rank 2 (pid ") and says in line and "stopping" in line
    assert time.monotonic() - begin < 20


def test_a_program_that_does_not_exist(launch):
    status, _, err = finish(launch("-n", "2", "/nonexistent/program.py"))
    assert status == 2 and "can't open file" in err and "exited with status 2" in err


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(launch, number):
    code = """
    def handler(number, frame):
        tell(f"rank {comm.rank} got {signal.Signals(number).name}")
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    comm.barrier()
    tell("ready")
    time.sleep(60)
    """
    process = launch("-n", "2", code=code)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    status, out, _ = finish(process)
    assert status == 128 + number
    assert sorted(out.splitlines()) == [f"rank {r} got {number.name}" for r in range(2)]


@pytest.mark.faults
def test_user_signals_do_not_end_the_job(launch):
    code = """
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    comm.barrier()
    tell("ready")
    while not got:
        time.sleep(0.01)
    """
    process = launch("-n", "2", code=code)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == 0


@pytest.mark.faults
def test_ctrl_z_stops_ranks_too(launch):
    """With what they have started, until the launcher is told to go on."""
    code = """
    import subprocess
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    child = subprocess.Popen(["sleep", "60"])
    comm.barrier()
    tell(f"{os.getpid()} {child.pid}")
    while not got:
        time.sleep(0.01)
    comm.barrier()
    child.kill()
    """

    def own_group():  # one that a shell could continue, whatever pytest's own is
        hear()
        os.setpgid(0, 0)

    process = launch("-n", "2", code=code, preexec_fn=own_group)
    pids = [process.pid, *(int(p) for _ in range(2) for p in process.stdout.readline().split())]

    def stopped():
        states = [Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] for p in pids]
        return [state == "T" for state in states]

    for _ in range(2):
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: all(stopped()))
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not any(stopped()))
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == 0


@pytest.mark.faults
def test_ranks_that_ignore_sigterm_are_killed(tmp_path):
    code = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    comm.barrier()
    tell(os.getpid())
    time.sleep(60)
    """
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    program = (
        "import collectives.cli.run as r, collectives.cli as c, sys\n"
        "r._GRACE = 0.3\n"
        "sys.exit(c.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "run", "-n", "2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [process.stdout.readline().strip() for _ in range(2)]
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.faults
def test_the_limit(launch, tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    status, _, err = finish(launch("-n", "2", "--limit", "0.2", str(script)))
    assert status == 124 and "ran for 0.2 s, the limit; stopping 2 ranks" in err


@pytest.mark.faults
def test_nothing_outlives_a_killed_launcher(launch):
    code = """
    comm.barrier()
    tell(os.getpid())
    time.sleep(60)
    """
    process = launch("-n", "2", code=code)
    pids = [process.stdout.readline().strip() for _ in range(2)]
    assert all(is_alive(pid) for pid in pids)
    process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    finish(process)


@pytest.mark.faults
def test_children_of_a_killed_rank_are_killed_too(launch):
    code = """
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tell(child.pid)
    time.sleep(60)
    """
    process = launch("-n", "1", code=code)
    child = process.stdout.readline().strip()
    assert is_alive(child)
    process.terminate()
    wait_until(lambda: not is_alive(child))
    assert finish(process)[0] == 128 + signal.SIGTERM


@pytest.mark.faults
def test_children_of_the_rank_that_failed_end_too(launch):
    """And those that take longer than their rank."""
    code = """
    import subprocess
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    children = [
        subprocess.Popen(["sleep", "60"]),
        subprocess.Popen([sys.executable, "-c", ignores]),
    ]
    for child in children:
        tell(child.pid)
    time.sleep(0.5)
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    time.sleep(60)
    """
    process = launch("-n", "2", code=code)
    children = [process.stdout.readline().strip() for _ in range(4)]
    assert finish(process)[0] == 3
    wait_until(lambda: not any(is_alive(child) for child in children))


@pytest.mark.faults
def test_children_have_time_to_end(launch, tmp_path):
    """Such as one that writes a checkpoint, when the job is told to end."""
    code = f"""
    import subprocess
    writes = (
        "import signal, sys, time\\n"
        "def end(*_):\\n"
        "    time.sleep(0.5); open({str(tmp_path / "written")!r}, 'w').close(); sys.exit()\\n"
        "signal.signal(signal.SIGTERM, end)\\n"
        "print('ready', flush=True)\\n"
        "time.sleep(60)\\n"
    )
    child = subprocess.Popen([sys.executable, "-c", writes])
    time.sleep(60)
    """
    process = launch("-n", "1", code=code)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM
    assert (tmp_path / "written").exists()


@pytest.mark.faults
def test_a_rank_that_has_left_its_group_is_ended(launch):
    code = """
    os.setpgid(0, os.getpgid(os.getppid()))
    tell("ready")
    time.sleep(60)
    """
    process = launch("-n", "1", code=code, process_group=0)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM


@pytest.mark.faults
def test_user_signals_are_for_ranks_alone(launch, tmp_path):
    """Asking for dumps does not end what ranks have started."""
    code = """
    import subprocess
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    child = subprocess.Popen(["sleep", "60"])
    comm.barrier()
    tell("ready")
    while not got:
        time.sleep(0.01)
    comm.barrier()
    time.sleep(0.2)
    tell(child.poll())
    child.kill()
    """
    process = launch("-n", "2", code=code)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[:2] == (0, "None\n" * 2)


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signals_that_the_launcher_was_told_to_ignore(launch, number):
    """As nohup does, and a shell for what it starts in the background."""
    code = """
    comm.barrier()
    tell("ready")
    time.sleep(0.7)
    tell("done")
    """
    ignore = {"preexec_fn": lambda: signal.signal(number, signal.SIG_IGN)}
    process = launch("-n", "2", code=code, **ignore)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    assert finish(process)[:2] == (0, "done\n" * 2)


@pytest.mark.faults
def test_a_failure_where_the_launcher_was_told_to_ignore_its_children(launch):
    code = """
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    time.sleep(60)
    """
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)}
    status, _, err = finish(launch("-n", "2", code=code, **ignore))
    assert status == 3 and "exited with status 3; stopping rank 0" in err


@pytest.mark.parametrize(("descriptor", "options"), [(0, ()), (1, ("--label",))])
def test_closed_files(launch, descriptor, options):
    closed = {"preexec_fn": lambda: os.close(descriptor)}
    status, _, err = finish(launch("-n", "2", *options, code="comm.barrier()", **closed))
    assert (status, err) == (0, "")


def test_too_few_files(launch):
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    status, _, err = finish(launch("-n", "16", "--label", code="comm.barrier()", preexec_fn=few))
    assert status == 2
    assert "Too many open files; raise the limit of open files (ulimit -n)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "2"], "no program to run"),
        (["-n", "2", "-m"], "no program to run"),
        (["-n", "2", "--"], "no program to run"),
        (["-n", "2", "-m", "--"], "no program to run"),
        (["-n", "2", "--", "-m"], "no program to run"),
        (["-n", "2", "--", "--limt", "2"], "unknown option '--limt'"),
        (["-n", "0", "x.py"], "'0' is no whole number >= 1"),
        (["x.py"], "required: -n"),
        (["-n", "2", "--nodes", "3", "x.py"], "2 ranks cannot be divided into 3 nodes"),
        (["-n", "2", "--timeout", "soon", "x.py"], "'soon' is no positive number of seconds"),
        (["-n", "2", "--bind", "192.0.2.1", "x.py"], "192.0.2.1 is no address of this host"),
    ],
)
def test_bad_arguments(arguments, says, capsys):
    try:
        status = cli.main(["run", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status in (1, 2)
    assert says in capsys.readouterr().err


def test_commands(capsys, tmp_path, monkeypatch):
    (tmp_path / "greet.py").write_text(
        '"""Say hello.\n\nAt length."""\nEXAMPLES = "examples:\\n  greet world"\n'
        'def add_arguments(parser):\n    parser.add_argument("whom")\n'
        'def run(args):\n    print("hello", args.whom)\n'
    )
    (tmp_path / "_private.py").write_text("raise AssertionError")
    (tmp_path / "broken.py").write_text(
        '"""Is never imported for the list."""\nraise AssertionError'
    )
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    assert {"run", "greet", "broken"} <= set(cli.commands()) and "_private" not in cli.commands()
    assert cli.main(["--help"]) == 0
    assert re.search(r"  greet +Say hello\.\n", capsys.readouterr().out)
    assert cli.main(["greet", "world"]) == 0
    assert capsys.readouterr().out == "hello world\n"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["greet", "--help"])
    assert "examples:\n  greet world" in capsys.readouterr().out
    assert cli.main([]) == 2
    capsys.readouterr()
    assert cli.main(["gret"]) == 2
    assert "unknown command 'gret'; did you mean 'greet'?" in capsys.readouterr().err
    sys.modules.pop("collectives.cli.greet", None)


def test_what_the_launcher_tells_is_written_in_one_piece(monkeypatch):
    """Else a line of a rank, which goes to the same pipe, comes between a line and its end."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    launcher._tell("rank 2 was ended")
    monkeypatch.undo()
    assert written == ["collectives run: rank 2 was ended\n"]
