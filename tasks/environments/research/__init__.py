"""research: questions over a corpus, answered with search, open, find and cited evidence."""
