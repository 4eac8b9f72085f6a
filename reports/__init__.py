"""The report page of one run, or of several runs side by side."""
