"""Execute a notebook in a real kernel: python run_notebook.py NOTEBOOK FOLDER RESULT

`test_notebook.py` runs this program as a fork of the suite's fork server, and the kernel is a fork of this program. Both have the
imports already.
"""

from __future__ import annotations

import sys

import nbformat
from nbclient import NotebookClient

_, source, folder, result = sys.argv
notebook = nbformat.read(source, as_version=4)
NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, result)
