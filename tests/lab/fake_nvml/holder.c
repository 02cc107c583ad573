/* holder STEP… : opens device nodes in the ways that go wrong, says `up PID` and waits. Its FAKE_VRAM says how much
 * GPU memory it stands for (see fake_nvml.c). Steps are taken in order:
 *
 *   NODE                open it
 *   --port N            listen on 127.0.0.1
 *   --deaf, --undeaf    ignore SIGTERM, or not any more
 *   --setsid, --setpgid lead a session, a process group
 *   --fork              go on in a child; the parent says `via PID`, reaps and stays
 *   --workers N         go on in N children (a pool); the launcher stays; after --respawn it starts them anew
 *   --map NODE          keep it mapped, with no descriptor
 *   --name TEXT         the name that the kernel keeps
 *   --become PROGRAM    on SIGUSR1 turn into this program (exec keeps pid, start time and descriptors); after
 *   --with NAME=VALUE   with this in the environment
 *   --vfork             wait for a vfork whose child never comes back: uninterruptible
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static char *become[8], **env_then;
extern char **environ;

static void turn(int number) {
    (void)number;
    execve(become[0], become, env_then ? env_then : environ);
    _exit(9);
}

static void stay(void) {
    for (;;)
        if (wait(NULL) < 0) pause();
}

int main(int argc, char **argv) {
    int respawn = 0, stuck = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--deaf")) signal(SIGTERM, SIG_IGN);
        else if (!strcmp(argv[i], "--undeaf")) signal(SIGTERM, SIG_DFL);
        else if (!strcmp(argv[i], "--name")) prctl(PR_SET_NAME, argv[++i]);
        else if (!strcmp(argv[i], "--respawn")) respawn = 1;
        else if (!strcmp(argv[i], "--vfork")) stuck = 1;
        else if (!strcmp(argv[i], "--setsid")) setsid();
        else if (!strcmp(argv[i], "--setpgid")) setpgid(0, 0);
        else if (!strcmp(argv[i], "--with")) {
            putenv(argv[++i]);
            env_then = environ;
        } else if (!strcmp(argv[i], "--become")) {
            become[0] = argv[++i], become[1] = "--quiet";
            signal(SIGUSR1, turn);
        } else if (!strcmp(argv[i], "--quiet")) {
            sigset_t none;
            sigemptyset(&none);
            sigprocmask(SIG_SETMASK, &none, NULL);
            stay();
        } else if (!strcmp(argv[i], "--fork")) {
            char said[32];
            int n = snprintf(said, sizeof said, "via %d\n", getpid());
            if (write(1, said, n) != n) return 4; /* before the child says anything */
            if (fork()) stay();
        } else if (!strcmp(argv[i], "--workers")) {
            int workers = atoi(argv[++i]), started = 0;
            while (workers && started < 500) {
                if (started >= workers) {
                    if (!respawn) stay();
                    wait(NULL);
                }
                started++;
                if (!fork()) workers = 0;
            }
            if (workers) stay();
        } else if (!strcmp(argv[i], "--map")) {
            int fd = open(argv[++i], O_RDWR);
            if (mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED) return 3;
            close(fd);
        } else if (!strcmp(argv[i], "--port")) {
            struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[++i]))};
            at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;
            setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
            if (bind(s, (void *)&at, sizeof at) || listen(s, 4096)) return 2;
        } else if (open(argv[i], O_RDWR) < 0) {
            perror(argv[i]);
            return 1;
        }
    }
    char said[32];
    int n = snprintf(said, sizeof said, "up %d\n", getpid());
    if (write(1, said, n) != n) return 4;
    if (stuck && !vfork()) {
        for (;;) pause();
    }
    stay();
}
