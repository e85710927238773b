package mirror;

import java.lang.instrument.Instrumentation;

/** Code that is brought into the virtual machine while it runs. */
public final class Agent {
    private Agent() {}

    public static void agentmain(String said, Instrumentation instrumentation) {
        System.setProperty("mirror.agent", said + " by " + Agent.class.getClassLoader().getName());
    }
}
