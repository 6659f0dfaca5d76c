"""Bad input and faults, row by row: `python -m tests.faults --whole` counts them all.

- A **row** is one line of the table in docs/faults.md: a kind of fault, and a function that yields
  its cases.
- A **case** is one fault, such as a file cut at one byte. It raises AssertionError if the library
  does not end as the row says: an error of one line, or the right output.
- The **counts** of a row say how many cases were right and wrong, and what the slowest and the
  largest took.
- A **story** is what a wrong case did, for whoever mends it.

Each row runs in a process of its own, without torch unless it says so, and every case has a limit
of time and of memory. pytest runs a sample of each row.
"""
