"""Detect mistakes in a script's use of the API, such as calling `steps` and `commit` out of order.

Left unchecked, such a mistake would silently count a step that was not trained, or train a step without
counting it. So it raises an exception whose message says what to do instead. A call that is only likely to be
a mistake causes one warning.
"""
