"""The docs against the code: command lines, options, links, and what is said of both."""
