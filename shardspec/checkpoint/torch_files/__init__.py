"""Files that torch wrote, read without it: zips, pickles that are never run, what lies in them."""
