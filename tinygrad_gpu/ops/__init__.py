"""The ops, one file a family: mathematics on arrays, and a Function with its explicit backward rule under it."""
