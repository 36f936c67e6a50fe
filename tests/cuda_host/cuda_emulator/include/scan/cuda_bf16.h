// Empty: the search for kernels reads a source file and its own headers, with their macros expanded, and nothing else.
