"""The same layout in the words of other libraries, and back; nothing is lost without a word."""
