"""The short training of tests/pipeline/training_worker.py with its checkpoints on S3, for tests that kill it:
`python mirrored_worker.py START PLACE REMOTE`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.storage.mirror import fetch_resume
from tasks.storage.uploader import uploading
from tests.pipeline.training_worker import main as train
from tests.storage.places import sections

if __name__ == "__main__":
    start, place, remote = sys.argv[1:]
    own, resume = sections(remote, Path(place)), Path(place) / "resume"
    fetch_resume(own, "train", resume)
    for checkpoint in resume.glob("iteration-*"):
        print(checkpoint.name)
    with uploading(own, [], stage="train", resume=resume):
        train(Path(start), Path(place))
