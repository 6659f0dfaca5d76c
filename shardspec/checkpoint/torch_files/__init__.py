"""Files of torch, read and written without it: zips, and pickles that are never run."""
