"""The fields of a command line: their help, their checks, and the objects that are made from them."""
