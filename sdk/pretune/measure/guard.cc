// Loaded first in every session of TVM's RPC server, so that a candidate cannot end the server.
//
// Each session is a process that the server forks, and in TVM 0.27 the server stops listening for good when
// that process ends with anything but 0: a candidate that crashes takes its device off the farm.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

struct Any {  // TVMFFIAny
  int32_t type_index;
  uint32_t padding;
  int64_t value;
};

// The session goes on in a child; this process waits for it, and ends with 0 whatever became of it.
extern "C" int __tvm_ffi_guard(void*, const Any*, int32_t, Any*) {
  pid_t session = fork();
  if (session < 0) return -1;
  if (session > 0) {
    int status;
    while (waitpid(session, &status, 0) < 0 && errno == EINTR) {
    }
    _exit(0);
  }
#ifdef __linux__
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a session that has expired is ended by its first process
#endif
  return 0;
}

// The session ends itself in so many seconds: a client that has given up cannot do it. 0 is never.
extern "C" int __tvm_ffi_deadline(void*, const Any* args, int32_t, Any*) {
  signal(SIGALRM, SIG_DFL);
  alarm(static_cast<unsigned>(args[0].value));
  return 0;
}
