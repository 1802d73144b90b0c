"""The report: results in, sections of words, tables and figures out, as one HTML page and one Markdown document."""
