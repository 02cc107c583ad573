/* holder [NODE…] [--port N] [--deaf] [--name TEXT] [--fork-and-die] [--map NODE] [--thread-only] : opens the nodes,
 * says `up PID` and waits. It stands for a process with a CUDA context; its FAKE_VRAM says how much it holds.
 *   --deaf            ignores SIGTERM
 *   --name TEXT       its name, as setproctitle would give it
 *   --workers N       starts N children that run the rest of the arguments, and waits for them (a pool)
 *   --respawn         with --workers: starts a worker anew when one ends
 *   --vfork           stays in vfork, whose child never comes back: uninterruptible
 *   --map NODE        keeps the node mapped, with no descriptor
 *   --child           forks; the child holds (says `up`), the parent waits for it: the child has the parent's group
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

int main(int argc, char **argv) {
    int workers = 0, respawn = 0, stuck = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--deaf")) signal(SIGTERM, SIG_IGN);
        else if (!strcmp(argv[i], "--name")) prctl(PR_SET_NAME, argv[++i]);
        else if (!strcmp(argv[i], "--respawn")) respawn = 1;
        else if (!strcmp(argv[i], "--vfork")) stuck = 1;
        else if (!strcmp(argv[i], "--child")) {
            if (fork()) {
                wait(NULL);
                return 0;
            }
        } else if (!strcmp(argv[i], "--workers")) {
            workers = atoi(argv[++i]);
            for (int started = 0;; started++) {
                if (started >= workers) {
                    if (!respawn) break;
                    wait(NULL);
                    if (started >= 200) break;
                }
                if (!fork()) {
                    workers = 0;
                    break;
                }
            }
            if (workers) {
                while (wait(NULL) > 0) continue;
                return 0;
            }
        } else if (!strcmp(argv[i], "--map")) {
            int fd = open(argv[++i], O_RDWR);
            if (mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED) return 3;
            close(fd);
        } else if (!strcmp(argv[i], "--port")) {
            struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[++i]))};
            at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;
            setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
            if (bind(s, (void *)&at, sizeof at) || listen(s, 16)) return 2;
        } else if (open(argv[i], O_RDWR) < 0) {
            perror(argv[i]);
            return 1;
        }
    }
    printf("up %d\n", getpid());
    fflush(stdout);
    if (stuck && !vfork()) {
        for (;;) pause();
    }
    for (;;) pause();
}
