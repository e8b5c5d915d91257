-- Compare-and-append of frames of one source's generation.
-- KEYS: meta frames offsets ctl
-- ARGV: source generation floor max_pending, then six values a frame: offset length wall mono gap data
-- Answer: outcome epoch committed sealed
local meta, frames, offsets, ctl = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local source, generation, floor, max_pending = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local field = source .. ':' .. generation
local OVERHEAD, FIRST, STEP = 100, 5, 6

-- tostring would print 1e+15 from there on.
local function text(number) return string.format('%.0f', number) end

local known = redis.call('HMGET', meta, 'epoch', 'state', 'pending')
local epoch, state, pending = known[1], known[2], tonumber(known[3]) or 0
local stored = redis.call('HMGET', offsets, field, field .. ':s')
local sealed = tonumber(stored[2]) or 0
local committed = math.max(tonumber(stored[1]) or 0, sealed)
if not epoch or state == 'archived' then
  return {'missing', '', text(math.max(floor, sealed)), text(math.max(floor, sealed))}
end
if (pending > 0 or committed > sealed) and redis.call('XLEN', frames) == 0 then
  if redis.call('EXISTS', frames) == 0 then  -- an emptied stream is still a key: this one was lost
    return {'missing', '', text(math.max(floor, sealed)), text(math.max(floor, sealed))}
  end
  sealed = committed  -- a commit that did not come past its trim
  pending = 0
end
sealed = math.max(sealed, floor)
committed = math.max(committed, floor)

local function answer(outcome) return {outcome, epoch, text(committed), text(sealed)} end

-- What would be added, before anything is.
local outcome, at, bytes = 'ok', committed, 0
for i = FIRST, #ARGV, STEP do
  local offset = tonumber(ARGV[i])
  local past = offset + tonumber(ARGV[i + 1])
  if past > at then
    if offset ~= at then
      outcome = 'gap'
      break
    end
    bytes = bytes + #ARGV[i + 5] + OVERHEAD
    at = past
  end
end
if bytes > 0 then
  if redis.call('HGET', ctl, 'pressure') == '1' then return answer('full') end
  if pending > 0 and pending + bytes > max_pending then return answer('full') end
end

-- Frames first, then the record of them. Out of memory shows at a script's first write and never
-- after it, so nothing is half done; should an XADD fail all the same, only what is in is recorded.
local failure, done, added = nil, committed, 0
if bytes > 0 then
  for i = FIRST, #ARGV, STEP do
    local offset = tonumber(ARGV[i])
    local past = offset + tonumber(ARGV[i + 1])
    if done == at then break end
    if past > done then
      local entry
      if ARGV[i + 4] == '' then
        entry = redis.pcall('XADD', frames, '*', 's', source, 'g', generation, 'o', ARGV[i], 'l', ARGV[i + 1],
          'w', ARGV[i + 2], 'm', ARGV[i + 3], 'd', ARGV[i + 5])
      else
        entry = redis.pcall('XADD', frames, '*', 's', source, 'g', generation, 'o', ARGV[i], 'l', ARGV[i + 1],
          'w', ARGV[i + 2], 'm', ARGV[i + 3], 'd', ARGV[i + 5], 'x', ARGV[i + 4])
      end
      if type(entry) == 'table' and entry.err then
        failure = entry.err
        break
      end
      done = past
      added = added + #ARGV[i + 5] + OVERHEAD
    end
  end
end
committed = done

if added > 0 then
  local time = redis.call('TIME')
  redis.call('HSET', offsets, field, text(committed), field .. ':s', text(sealed))
  -- New bytes after "drained": the node has to say it again.
  local now = time[1] .. '.' .. string.format('%06d', tonumber(time[2]))
  redis.call('HSET', meta, 'pending', text(pending + added), 'state', 'open', 'last_append', now)
  if pending == 0 then redis.call('HSET', meta, 'waiting', now) end
elseif committed > (tonumber(stored[1]) or 0) or sealed > (tonumber(stored[2]) or 0) then
  redis.pcall('HSET', offsets, field, text(committed), field .. ':s', text(sealed))
end
if failure then
  if string.find(failure, 'OOM', 1, true) then return answer('full') end
  return redis.error_reply(failure)
end
return answer(outcome)
