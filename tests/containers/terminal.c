/* A program in a container that has a terminal of its own (pty), and beside it the program that its arguments name.

   Its child answers in capitals what is written to the terminal. Before each step something lies in it that nobody has
   read yet. The parent writes to the file "out" what it has read then, or the error; a file "step" is the next step. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

static void answer(void)
{
    char text[100];
    struct termios raw;
    tcgetattr(0, &raw);
    cfmakeraw(&raw);
    tcsetattr(0, TCSANOW, &raw);
    if (write(1, "R", 1) != 1)
        _exit(1);
    for (ssize_t size; (size = read(0, text, sizeof text)) > 0;) {
        for (ssize_t i = 0; i < size; i++)
            text[i] = toupper(text[i]);
        if (write(1, text, size) != size)
            break;
    }
    _exit(0);
}

static void tell(const char *text)
{
    FILE *file = fopen("out.new", "w");
    fputs(text, file);
    fclose(file);
    rename("out.new", "out");
}

static int failed(const char *what)
{
    char text[200];
    snprintf(text, sizeof text, "%s: %s", what, strerror(errno));
    tell(text);
    pause();
    return 1;
}

int main(int count, char **words)
{
    int terminal;
    char letter = 0;
    if (count > 1 && fork() == 0) {
        execv(words[1], words + 1);
        _exit(1);
    }
    if (forkpty(&terminal, NULL, NULL, NULL) == 0)
        answer();
    if (read(terminal, &letter, 1) != 1) /* it is raw now */
        return failed("begin");
    tell("ready");
    for (;;) {
        char text[100] = "";
        if (write(terminal, "hello", 5) != 5)
            return failed("write");
        while (access("step", F_OK) != 0)
            usleep(5000);
        unlink("step");
        if (write(terminal, "again", 5) != 5)
            return failed("write");
        for (size_t size = 0; size < 10;) {
            ssize_t got = read(terminal, text + size, sizeof text - 1 - size);
            if (got <= 0)
                return failed("read");
            size += got;
        }
        tell(text);
    }
}
