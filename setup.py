"""The description on a package index: README.md, whose links to files of the project are made absolute."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
HOME = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
README = (HERE / "README.md").read_text(encoding="utf-8")
RELATIVE = r"(?![a-z]+:|#)"

with_pictures = re.sub(rf"(!\[[^]]*\]\(){RELATIVE}", rf"\1{HOME}/raw/main/", README)
description = re.sub(rf"(\]\(){RELATIVE}", rf"\1{HOME}/blob/main/", with_pictures)

setup(long_description=description, long_description_content_type="text/markdown")
