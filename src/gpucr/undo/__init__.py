"""Operations that can be undone: steps, signals, and the guard that takes over when gpucr dies."""
