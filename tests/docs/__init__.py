"""The docs agree with the code: command lines, options, links and facts."""
