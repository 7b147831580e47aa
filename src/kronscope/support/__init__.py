"""What every layer may use and that knows no mathematics: arguments, warnings, files, processes."""
