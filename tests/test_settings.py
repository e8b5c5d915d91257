"""The settings' loader: one order of places, and an error that says what to mend."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainarchive import settings
from trainarchive.errors import SettingsError
from trainarchive.places import shipped
from trainarchive.run import is_safe_name
from trainarchive.settings import Name, Settings, load

_ASSIGNMENT = re.compile(r"# (?=[a-z0-9_]+ = )")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, on a host that has no site file."""
    monkeypatch.setattr(settings, "SITE_CONFIG", tmp_path / "etc" / "trainarchive.toml")
    return tmp_path


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _uncommented() -> str:
    return "\n".join(_ASSIGNMENT.sub("", line) for line in shipped("config/trainarchive.toml").read_text().splitlines())


def _defaults(home: Path) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(Settings(home=home), enc_hook=str))
    return decoded


def test_without_anything_all_is_default(home: Path) -> None:
    """No file and no variable: the schema's defaults."""
    assert load({"TRAINARCHIVE_HOME": str(home), "PATH": "/bin"}) == Settings(home=home)


def test_home_without_a_word_is_the_users(home: Path) -> None:
    """Nobody named a home: the user's data directory, and an empty variable names none."""
    assert load({"TRAINARCHIVE_HOME": ""}).home.name == "trainarchive"
    assert load({"TRAINARCHIVE_HOME": "/elsewhere"}, home=home).home == home


def test_the_later_place_wins(home: Path) -> None:
    """Defaults, then the file, then the environment."""
    _write(home / "trainarchive.toml", 'cluster = "lab"\n[seal]\nmin_age_s = 5\nlease_s = 7\n[log]\nurl = "redis://f"')
    loaded = load({"TRAINARCHIVE_SEAL_MIN_AGE_S": "1.5", "TRAINARCHIVE_LOG_URL": "redis://e"}, home=home)
    assert (loaded.cluster, loaded.log.url) == ("lab", "redis://e")
    assert loaded.seal == settings.Seal(min_age_s=1.5, lease_s=7.0)


def test_one_file_is_read(home: Path) -> None:
    """The named file, else home's, else the site's; never two of them."""
    named = _write(home / "named.toml", 'cluster = "named"')
    other = _write(home / "other.toml", 'cluster = "other"')
    site = _write(settings.SITE_CONFIG, 'cluster = "site"\n[node]\nspool = "/n1"')
    assert load({}, home=home).cluster == "site"
    _write(home / "trainarchive.toml", 'cluster = "home"')
    assert (load({}, home=home).cluster, load({}, home=home).node.spool) == ("home", "")
    assert load({"TRAINARCHIVE_CONFIG": str(named)}, home=home).cluster == "named"
    assert load({"TRAINARCHIVE_CONFIG": str(named)}, home=home, config=other).cluster == "other"
    site.unlink()


def test_a_named_file_must_be_there(home: Path) -> None:
    """Silence about a missing file would run a site on defaults."""
    for absent in (home / "absent.toml", home):
        with pytest.raises(SettingsError, match=re.escape(str(absent))):
            load({"TRAINARCHIVE_CONFIG": str(absent)}, home=home)


@pytest.mark.parametrize("what", ["directory", "fifo", "dangling link", "loop", "link to a directory"])
def test_what_stands_in_the_files_place_is_not_passed_over(home: Path, what: str) -> None:
    """Somebody meant a file to be read there; the next place's would be another."""
    place = home / "trainarchive.toml"
    match what:
        case "directory":
            place.mkdir()
        case "fifo":
            os.mkfifo(place)
        case "dangling link":
            place.symlink_to("nowhere")
        case "loop":
            place.symlink_to(place)
        case _:
            place.symlink_to(home)
    _write(settings.SITE_CONFIG, 'cluster = "site"')
    with pytest.raises(SettingsError, match="not a file") as caught:
        load({}, home=home)
    assert caught.value.where == str(place)


def test_a_link_to_a_file_is_a_file(home: Path) -> None:
    """Configuration management links files."""
    (home / "trainarchive.toml").symlink_to(_write(home / "real.toml", 'cluster = "linked"'))
    assert load({}, home=home).cluster == "linked"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_place_that_cannot_be_looked_at_is_told(home: Path) -> None:
    """Whether there is a file nobody knows: not silence."""
    _write(settings.SITE_CONFIG, "").parent.chmod(0)
    try:
        with pytest.raises(SettingsError, match=r"Permission denied \(name another file with --config"):
            load({}, home=home)
    finally:
        settings.SITE_CONFIG.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("section", "url", "says"),
    [
        ("log", "redis://h:6379/0", None),
        ("log", "rediss://user:secret@h", None),
        ("log", "unix:///run/redis.sock?db=0", None),
        ("log", "redis+socket:///run/redis.sock", "kind that is known.*known: redis://, rediss://, unix://"),
        ("log", "user:secret@h:6379", "kind that is known"),
        ("log", "REDIS://h", "kind that is known"),
        ("log", "http://h", "kind that is known"),
        ("broker", "redis://h", None),
        ("broker", "redis+socket:///run/redis.sock?virtual_host=1", None),
        ("broker", "sentinel://a:26379;sentinel://b:26379", None),
        ("broker", "unix:///run/redis.sock", r"kind that is known.*redis\+socket://"),
        ("broker", "amqp://h", "kind that is known"),
        ("log", "redis://h:secret", "no URL"),
        ("log", "unix://relative", "absolute path of a socket"),
        ("broker", "redis+socket://", "absolute path of a socket"),
        ("store", "file://host/srv", "three slashes"),
        ("store", "file:///a?b", "%3F"),
        ("store", "file:///a%00b", "NUL"),
        ("store", "file:///srv", None),
        ("store", "memory://", None),
        ("store", "s3://bucket/prefix", "s3:// is not built yet.*known: file://"),
        ("store", "/srv", "kind that is known"),
    ],
)
def test_a_url_that_nobody_serves_is_told_at_once(home: Path, section: str, url: str, says: str | None) -> None:
    """Not by the first task or exchange that fails over it; its password stays out of the words."""
    variable = f"TRAINARCHIVE_{section.upper()}_URL"
    if says is None:
        assert getattr(load({variable: url}, home=home), section).url == url
        return
    with pytest.raises(SettingsError, match=rf"\[{section}\] url: .*{says}") as caught:
        load({variable: url}, home=home)
    assert caught.value.where == variable
    assert "secret" not in str(caught.value)


def test_patterns_that_can_be_used(home: Path) -> None:
    """All placeholders, wildcards, and {workdir} at the beginning."""
    good = ("{workdir}/logs/*.log", "/scratch/{user}/{job_id}-{node}/[ab]?.txt", "/a")
    assert load({"TRAINARCHIVE_SOURCES_PATTERNS": ",".join(good)}, home=home).sources.patterns == good


def test_every_setting_can_come_from_the_environment(home: Path) -> None:
    """Each default, written as text into its variable, is read back as itself."""
    built = _defaults(home)
    variables = {}
    for section, values in built.items():
        for key, value in (values if isinstance(values, dict) else {"": values}).items():
            text = ",".join(value) if isinstance(value, list) else str(value)
            variables["_".join(filter(None, ("TRAINARCHIVE", section.upper(), key.upper())))] = text
    assert len(variables) > 30
    assert load(variables) == Settings(home=home)


def test_lists_by_commas(home: Path) -> None:
    """A list's variable holds its items with commas between; blanks around them are not theirs."""
    loaded = load({"TRAINARCHIVE_SOURCES_NAMES": "*.log, *.txt,,"}, home=home)
    assert loaded.sources.names == ("*.log", "*.txt")
    assert load({"TRAINARCHIVE_SOURCES_NAMES": ""}, home=home).sources.names == ()


def test_the_hooks_variables_are_no_settings(home: Path) -> None:
    """A command inside a job sees the hooks' variables, and goes on."""
    assert load(dict.fromkeys(settings.NOT_SETTINGS - {"TRAINARCHIVE_CONFIG"}, "/x"), home=home) == Settings(home=home)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[seal]\nmin_age = 5", r"unknown key 'min_age' in \[seal\] \(do you mean min_age_s\?\)"),
        ("[seals]\nx = 5", r"unknown section or key 'seals' \(do you mean seal\?\)"),
        ("klaster = 'x'", r"unknown section or key 'klaster' \(do you mean cluster\?\)"),
        ("zzz = 1", r"unknown section or key 'zzz' \(known: broker, cluster, collector"),
        ("home = '/x'", "unknown section or key 'home'"),
        ("seal = 5", r"seal is a section \(write \[seal\]"),
        ("[[seal]]\nmin_age_s = 5", "seal is a section"),
        ("[seal]\nmin_age_s = '5'", r"\[seal\] min_age_s: expected float, got str"),
        ("[seal]\nmin_age_s = true", r"\[seal\] min_age_s: expected float, got bool"),
        ("[seal]\nsegment_mib = 1.5", r"\[seal\] segment_mib: expected int, got float"),
        ("[seal]\nsegment_mib = 0", r"\[seal\] segment_mib: expected int >= 1"),
        ("[seal]\nmin_age_s = -1", r"\[seal\] min_age_s: expected float >= 0"),
        ("[seal]\nlease_s = nan", r"\[seal\] lease_s: expected float > 0"),
        ("[seal]\nlease_s = inf", r"\[seal\] lease_s: expected float <= 31622400"),
        ("[log]\nstop_at_memory_ratio = 1.1", r"stop_at_memory_ratio: expected float <= 1"),
        ("[sources]\nnames = '*.log'", r"\[sources\] names: expected array, got str"),
        ("[sources]\nnames = [1]", r"\[sources\] names: expected str, got int"),
        ("[sources]\npatterns = ['/a', '{work_dir}/x']", r"\[sources\] patterns: .*unknown placeholder \{work_dir\}"),
        ("[sources]\npatterns = ['/a/{a,b}/x']", r"unknown placeholder \{a,b\} \(known: \{workdir\}, \{user\}"),
        ("[sources]\npatterns = ['/a/{}/x']", r"unknown placeholder \{\}"),
        ("[sources]\npatterns = ['/a/{user']", "brace without its other half"),
        ("[sources]\npatterns = ['logs/*.log']", r"patterns: 'logs/\*\.log': a relative path \(begin it with / or"),
        ("[sources]\npatterns = ['{workdir}']", "a relative path"),
        ("[sources]\npatterns = ['{user}/x']", "a relative path"),
        ("[sources]\npatterns = ['/a/{workdir}/x']", r"\{workdir\} may stand only at the beginning"),
        ('[sources]\npatterns = ["/a\\u0000"]', "NUL cannot be in a path"),
        ("[store]\nurl = 'file://srv/x'", r"\[store\] url: a file:// URL needs three slashes"),
        ("[log]\nurl = 'redis://h:port'", r"\[log\] url: no URL"),
        ("cluster = 'a/b'", "cluster: expected str matching"),
        ("[node]\nspool = 'spool'", r"\[node\] spool: expected str matching"),
        ("[seal]\nmin_age_s = 700", r"\[seal\] max_age_s is smaller than min_age_s"),
        ("[seal]\n\nmin_age_s = = 5", r"not TOML: .* line 3"),
        ("[seal]\nlease_s = 1\nlease_s = 2\n", r"not TOML: .* line 3"),
        ("x = " + "[" * 100_000, "not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_expected(home: Path, text: str, says: str) -> None:
    """File, key, what is expected, the nearest right name: in one line."""
    file = _write(home / "trainarchive.toml", text)
    with pytest.raises(SettingsError, match=says) as caught:
        load({}, home=home)
    assert caught.value.where == str(file)
    assert caught.value.exit_status == 2


def test_a_file_that_is_not_text(home: Path) -> None:
    """Other encodings are refused with the place, not guessed."""
    (home / "trainarchive.toml").write_bytes(b"cluster = '\xff'")
    with pytest.raises(SettingsError, match="not UTF-8 at byte 11"):
        load({}, home=home)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TRAINARCHIVE_SEAL_MINAGE_S", "1", r"no such setting \(do you mean TRAINARCHIVE_SEAL_MIN_AGE_S\?\)"),
        ("TRAINARCHIVE_HOM", "/x", r"no such setting \(do you mean TRAINARCHIVE_HOME\?\)"),
        ("TRAINARCHIVE_SEAL_LEASE_S", "soon", r"\[seal\] lease_s: expected float$"),
        ("TRAINARCHIVE_SEAL_LEASE_S", "-1", r"\[seal\] lease_s: expected float > 0"),
        ("TRAINARCHIVE_SEAL_LEASE_S", "nan", r"\[seal\] lease_s: expected float > 0"),
        ("TRAINARCHIVE_WORKER_CONCURRENCY", "1.5", r"\[worker\] concurrency: expected int$"),
        ("TRAINARCHIVE_CLUSTER", "-x", "cluster: expected str matching"),
        ("TRAINARCHIVE_LOG_URL", "redis://\udcff", r"\[log\] url: not UTF-8"),
    ],
)
def test_a_wrong_variable_is_named_with_what_is_expected(home: Path, name: str, value: str, says: str) -> None:
    """The variable stands in the file's place."""
    with pytest.raises(SettingsError, match=says) as caught:
        load({name: value}, home=home)
    assert caught.value.where == name


def test_errors_show_no_values(home: Path) -> None:
    """A URL with its password never gets into a message."""
    _write(home / "trainarchive.toml", '[log]\nurl = ["redis://:secret@h"]\n[node]\nspool = "secret"')
    for environ in ({}, {"TRAINARCHIVE_NODE_STATE": "secret!"}):
        with pytest.raises(SettingsError) as caught:
            load(environ, home=home)
        assert "secret" not in str(caught.value)


def test_order_is_checked_over_all_places(home: Path) -> None:
    """A file and a variable that are each right, but not together, are both named."""
    file = _write(home / "trainarchive.toml", "[collector]\npoll_max_ms = 30")
    with pytest.raises(SettingsError, match="poll_max_ms is smaller than poll_min_ms") as caught:
        load({"TRAINARCHIVE_COLLECTOR_POLL_MIN_MS": "40"}, home=home)
    assert caught.value.where == f"{file}, TRAINARCHIVE_COLLECTOR_POLL_MIN_MS"


def test_the_shipped_file_changes_nothing(home: Path) -> None:
    """As it comes, every setting in it is a comment."""
    text = shipped("config/trainarchive.toml").read_text()
    assert all(value == {} for value in tomllib.loads(text).values())
    _write(home / "trainarchive.toml", text)
    assert load({}, home=home) == Settings(home=home)


def test_the_shipped_file_shows_every_setting(home: Path) -> None:
    """Uncommented, it holds all keys of the schema, none else, each with its default."""
    shown = tomllib.loads(_uncommented())
    expected = _defaults(home)
    del expected["home"]
    assert shown == expected
    assert [list(section) for section in shown.values() if isinstance(section, dict)] == [
        list(section) for section in expected.values() if isinstance(section, dict)
    ]


def test_every_setting_is_explained() -> None:
    """Prose stands before each assignment, or before the group that it ends."""
    lines = shipped("config/trainarchive.toml").read_text().splitlines()
    for number, line in enumerate(lines):
        if _ASSIGNMENT.match(line):
            first = next(n for n in range(number, -1, -1) if not _ASSIGNMENT.match(lines[n]))
            assert lines[first].startswith("# "), f"{line} has no explanation"


@given(st.text(st.sampled_from("aZ0-._/ \n"), max_size=8) | st.text(max_size=300))
@example("a" * 253)
@example("a" * 254)
@example("a\n")
def test_names_in_settings_are_names_in_keys(name: str) -> None:
    """The schema's pattern is ``is_safe_name``, or empty."""
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        assert not is_safe_name(name)
        assert name
    else:
        assert is_safe_name(name) or not name
