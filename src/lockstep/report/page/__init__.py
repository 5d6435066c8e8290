"""`report.html`: one page about a run, or several runs side by side, made from the files that runs leave."""
