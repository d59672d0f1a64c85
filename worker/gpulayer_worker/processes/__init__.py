"""Job processes as the worker sees them: started, watched, ended, by fork servers on Linux and directly elsewhere."""
